"""A budget of imports: how many modules and processes a command needs, and which libraries it must do without."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import FAST, ROOT, environment
from tests.kit.few import slow

PROBE = """
import gc, json, os, runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0], sys.path[0] = script, os.path.dirname(script)
started, kinds = [], ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
sys.addaudithook(lambda kind, facts: started.append(str(facts[0] if facts else kind)) if kind in kinds else None)
code = None
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as stop:
    code = stop.code
print(json.dumps([code, sorted(sys.modules), started, gc.isenabled(), gc.get_freeze_count()]), file=sys.stderr)
"""
BEFORE_TORCH = {"torch", "lightning", "numpy", "rich", "wandb", "ctypes", "wellfed.record", "wellfed.run.train"}
"""Modules that help, a configuration and a typo need not."""
OF_OTHERS = {
    *("transformers", "scipy", "pandas", "sklearn", "wandb", "pydantic", "requests", "optuna", "mlflow", "tensorboard"),
    *("sympy", "torch._dynamo.eval_frame", "torch._inductor"),
    *("torchmetrics.classification", "torchmetrics.functional", "torchmetrics.text", "torchmetrics.audio"),
}
"""Modules that a run needs only where its configuration names something that uses them."""


def probed(script: str, *words: str, cwd: Path | None = None) -> tuple[int, set[str], list[str], bool, int]:
    """A command in a process of its own: exit code, modules, processes that it started, and its garbage collector."""
    command = [sys.executable, "-c", PROBE, str(ROOT / "src" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd or ROOT, env=environment(), timeout=300)
    found: Any = json.loads(done.stderr.splitlines()[-1])
    return found[0], set(found[1]), found[2], found[3], found[4]


@pytest.mark.parametrize(("imported", "most"), [("wellfed", 120), ("wellfed.data", 120)])
def test_a_package_of_public_names_imports_next_to_nothing(imported: str, most: int):
    code = f"import sys, {imported}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert len(modules) < most
    assert BEFORE_TORCH.isdisjoint(modules)


LIGHT = {
    "wellfed.contract": "",
    "wellfed.observe.loggers.wandb_sink": "",
    "wellfed.plan.predict.peak": "",
    "wellfed.observe.hardware.profiles": "",
    "wellfed.observe.hardware.detect": "machine",
    "wellfed.run.folder.checkpoint_file": "",
    "wellfed.run.folder.resume": "",  # imports Hydra
}
"""Modules that are imported before torch or without it, and what is called in them."""


def test_modules_that_need_no_torch_import_none():
    code = f"""
import importlib, sys
for name, called in {LIGHT}.items():
    module = importlib.import_module(name)
    getattr(module, called, bool)()
    print(name, *{{"torch", "lightning", "hydra", "numpy", "rich", "wandb"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", check=True)
    *others, resume = done.stdout.splitlines()
    assert others == [*LIGHT][:-1]
    assert resume == "wellfed.run.folder.resume hydra"


def test_a_run_starts_without_what_draws_its_page_and_what_few_runs_need():
    code = "import sys, wellfed.run.train, wellfed.run.stages; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", check=True)
    assert {"jinja2", "matplotlib", *OF_OTHERS}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    ("script", "words", "code"),
    [
        ("train.py", ["--help"], 0),
        slow("train.py", ["--cfg", "job"], 0),
        ("train.py", ["gpu=42gb"], 2),
        slow("evaluate.py", ["--cfg", "job"], 0),
    ],
)
def test_what_is_told_before_a_run_needs_no_code_of_a_run(script: str, words: list[str], code: int):
    ended, modules, started, is_collecting, _ = probed(script, *words)
    assert (ended, started, is_collecting) == (code, [], True)
    assert BEFORE_TORCH.isdisjoint(modules)
    assert len(modules) < 430, "Hydra alone needs 313 of them"


@pytest.mark.slow
def test_a_run_and_an_evaluation_import_what_they_use_alone(tmp_path: Path):
    """GPT-2 is left out, which needs transformers. Four questions to git, and one to uname by Python's platform."""
    words = [*(word for word in FAST if "encoder" not in word), "workload.model.text=none", f"paths.log_dir={tmp_path}"]
    ended, modules, started, is_collecting, frozen = probed("train.py", "trainer.max_steps=1", "logger=none", *words)
    assert ended == 0
    assert OF_OTHERS.isdisjoint(modules)
    assert len(modules) < 2200
    assert sorted(started) in (["git"] * 4 + ["uname"], ["git"] * 4)
    assert is_collecting
    assert frozen > 100_000, "collections look at all of torch again"

    (checkpoint,) = tmp_path.rglob("last.ckpt")
    ended, modules, started, is_collecting, _ = probed("evaluate.py", f"checkpoint={checkpoint}")
    assert (ended, is_collecting) == (0, True)
    assert OF_OTHERS.isdisjoint(modules)
    assert set(started) <= {"git", "uname"}


@pytest.mark.slow
def test_wandb_starts_one_process_and_imports_neither_pandas_nor_its_launch(tmp_path: Path):
    words = [*FAST, "workload.model.text=none", f"paths.log_dir={tmp_path}", "logger=wandb", "logger.mode=offline"]
    ended, modules, started, _, _ = probed("train.py", "trainer.max_steps=1", *words)
    assert ended == 0
    assert "wandb" in modules
    assert modules.isdisjoint({"pandas", "wandb.sdk.launch", "opentelemetry.sdk"})
    assert len([name for name in started if "git" not in name and "uname" not in name]) <= 1, "wandb's own service"
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.slow
def test_the_process_of_a_study_imports_neither_torch_nor_lightning(tmp_path: Path):
    """Its fork server does so, while the points are composed."""
    words = [*(word for word in FAST if "encoder" not in word), "workload.model.text=none", f"paths.log_dir={tmp_path}"]
    swept = ["-m", "sweep=quick", "loader=baseline,balanced", "sweep.trial_steps=10", "logger=none", *words]
    ended, modules, *_ = probed("train.py", *swept)
    assert ended == 0
    assert {"torch", "lightning", *OF_OTHERS}.isdisjoint(modules)
