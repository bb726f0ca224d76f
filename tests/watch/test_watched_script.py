"""``wellfed watch`` on small training scripts: what they compute stays, and what slows them down is found.

Steps, samples and pauses of further loops: test_loops_of_scripts.py. On simulated cards: test_scripts_on_cards.py.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.few import few, slow
from tests.watch.watching import (
    SCRIPTS,
    WATCH,
    alone_and_watched,
    ended,
    findings_of,
    folder_of,
    record_of,
    rows_of,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("classify.py", ["--workers", "2", "--images", "160", "--output"]),
        slow("two_players.py", []),
    ],
    ids=["workers", "two models"],
)
def test_nothing_changes_in_what_a_script_computes(script: str, arguments: list[str], tmp_path: Path) -> None:
    """Weights, printed losses, random draws of process and workers, bit for bit."""
    alone = ended(SCRIPTS / script, *arguments, tmp_path / "alone.pt", cwd=tmp_path)
    done = ended(*WATCH, SCRIPTS / script, *arguments, tmp_path / "watched.pt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert alone.returncode == 0, alone.stderr
    assert same(torch.load(tmp_path / "alone.pt"), torch.load(tmp_path / "watched.pt"))
    assert "Report   logs/watch/runs/" in done.stderr
    assert record_of(tmp_path).status == "ok"


@pytest.mark.slow
def test_a_loop_without_a_loader(tmp_path: Path) -> None:
    """Also a whole model, saved while its calls are watched, needs no wellfed."""
    alone = ended(SCRIPTS / "char_transformer.py", tmp_path / "alone.pt", cwd=tmp_path)
    done = ended(*WATCH, SCRIPTS / "char_transformer.py", tmp_path / "watched.pt", cwd=tmp_path)
    assert done.stdout == alone.stdout
    assert (tmp_path / "watched.pt").read_bytes().count(b"wellfed") == 0
    record = record_of(tmp_path)
    assert (record.steps, record.epochs) == (60, None)
    assert "No DataLoader was iterated" in done.stderr
    assert record.throughput is not None
    assert record.throughput["sample_unit"] == "steps"
    assert record.phases["checkpoint"]["times"] == 1
    assert record.process is not None
    assert record.process["parameter_values"] > 10_000


@pytest.mark.slow
def test_nothing_is_compiled_again(tmp_path: Path) -> None:
    """Nor are there other graphs, or a trace of the watch in saved, scripted and copied models. Its loaders are gone
    while they are iterated over."""
    alone = ended(SCRIPTS / "compiled.py", cwd=tmp_path)
    done = ended(*WATCH, SCRIPTS / "compiled.py", cwd=tmp_path)
    assert alone.stdout.count("'unique_graphs': 1") == 3
    assert (done.returncode, done.stdout) == (0, alone.stdout)
    assert record_of(tmp_path).samples == 4 * 2 * 80


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A script whose training process reads slowly stored pictures itself."""
    folder = tmp_path_factory.mktemp("starved")
    words = ["--read-ms", "2", "--images", "800"]
    return folder, ended(*WATCH, SCRIPTS / "classify.py", *words, cwd=folder)


def test_a_slow_dataset_is_found(starved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = starved
    record = record_of(folder)
    assert done.returncode == 0
    assert findings_of(record)[0] == "loading_in_main_process"
    (finding,) = [one for one in record.findings if one["id"] == "loading_in_main_process"]
    assert re.fullmatch(r"DataLoader\(num_workers=\d+, persistent_workers=True\)", finding["change"][0])
    assert finding["change"][0] in done.stderr
    assert record.time is not None
    assert record.time["wait_frac"] > 0.6
    assert (record.steps, record.samples, record.epochs, record.workload) == (100, 1600, 2, "classify.py")
    assert record.plan["loader.num_workers"]["value"] == 0
    assert record.phases["validate"]["times"] == 2
    assert record.loading["batch_mib"] == pytest.approx(16 * (3 * 16 * 16 * 4 + 8) / 2**20)


def test_its_files_are_those_of_any_run(starved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = starved
    run, rows = folder_of(folder), rows_of(folder)
    files = {"run.json", "steps.csv", "telemetry.csv", "report.md", "report.html"}
    assert {path.name for path in run.iterdir()} >= files
    assert [int(row["step"]) for row in rows] == list(range(1, 101))
    assert {row["epoch"] for row in rows} == {"0", "1"}
    assert {(row["samples"], row["num_micro"]) for row in rows} == {("16", "1")}
    page = (run / "report.html").read_text()
    assert "classify.py" in page
    assert "DataLoader(num_workers=" in page


@pytest.mark.slow
def test_a_library_that_searches_torch_before_its_import(tmp_path: Path) -> None:
    """As transformers and datasets do."""
    (tmp_path / "train.py").write_text(
        """
import importlib.util
print(importlib.util.find_spec("torch").name, importlib.util.find_spec("torch").name)
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
"""
    )
    done = ended(*WATCH, "train.py", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout) == (0, "torch torch\n")
    assert record_of(tmp_path).steps == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    few(["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(4)", "raise ValueError('a bad batch')"], 1),
)
def test_a_script_that_ends_in_training_leaves_a_record(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"""
import os, signal, time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    model(x).mean().backward()
    optimizer.step()
for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(800, 4)), batch_size=4)):
    step(x)
    time.sleep(0.02)
    if number == 60:
        {how}
"""
    )
    raised = "raise" in how
    done, alone = ended(*WATCH, "train.py", cwd=tmp_path), ended("train.py", cwd=tmp_path, fresh=raised)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert set(alone.stderr.splitlines()) <= set(done.stderr.splitlines())  # frames of the watch come first
    record = record_of(tmp_path)
    assert record.status == ("failed" if raised else "killed")
    assert (record.error is not None) == raised
    report = ended("-m", "wellfed", "report", folder_of(tmp_path), cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "slow_callbacks" in (folder_of(tmp_path) / "report.md").read_text()


@pytest.mark.slow
def test_a_failure_of_the_watch_leaves_the_script_alone(tmp_path: Path) -> None:
    """No folder can be made."""
    (tmp_path / "file").write_text("")
    words = ["--images", "64", "--epochs", "1"]
    alone = ended(SCRIPTS / "classify.py", *words, cwd=tmp_path)
    done = ended(*WATCH, "--log-dir", "file", SCRIPTS / "classify.py", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, alone.stdout)
    assert re.search(r"watches no more \(paths.log_dir=.*file: can't be written.*\); the training goes on", done.stderr)
    assert "nothing was run" not in done.stderr


@pytest.mark.slow
def test_loaders_models_and_optimizers_of_any_kind_are_left_alone(tmp_path: Path) -> None:
    alone, done = alone_and_watched(
        """
import functools, torch
torch.manual_seed(0)
from torch.utils.data import DataLoader
class Cached(DataLoader):
    def _get_iterator(self):
        return iter([torch.ones(2, 4)] * 3)
class Unhashable(DataLoader):
    def __eq__(self, other):
        return True
class Model(torch.nn.Linear):
    pass
class Own(torch.optim.SGD):
    def step(self, model, closure=None):
        print(type(model).__name__, getattr(closure, "__name__", ""), getattr(closure, "tries", 0))
        closure()
        return super().step()
class Loss:
    tries = 3
    def __call__(self):
        optimizer.zero_grad()
        return model(torch.ones(2, 4)).mean().backward()
model = Model(4, 1)
Model.__call__ = functools.partial(lambda x: model.forward(x))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for loader in (Cached(range(3)), Unhashable(torch.ones(8, 4), batch_size=2)):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
optimizer = Own(model.parameters(), lr=0.1)
for closure in (Loss(), Loss().__call__):
    optimizer.step(model, closure)
    optimizer.step(model, closure=closure)
print(model.weight.tolist())
""",
        tmp_path,
    )
    assert alone.returncode == 0, alone.stderr
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
    assert record_of(tmp_path).steps == 11
    assert "Batches of a DataLoader could not be seen" in done.stderr
