"""Pages, help and messages name no knob, option, flag, file or module that does not exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.every.test_docs import PAGES as DOCUMENTS
from tests.every.test_docs import page
from wellfed.config.knobs import FREE_NODES, entries
from wellfed.config.schema import EvaluateConfig, RunConfig, TuneRunConfig

ROOT = Path(__file__).parents[2]
CODE = sorted((ROOT / "src" / "wellfed").rglob("*.py"))
KNOBS = {name: entry for kind in (RunConfig, TuneRunConfig, EvaluateConfig) for name, entry in entries(kind).items()}
GROUPS = {name.partition(".")[0] for name in KNOBS if "." in name}
OPTIONS = {
    path.name: {each.stem for each in path.glob("*.yaml")} for path in (ROOT / "configs").iterdir() if path.is_dir()
}
NAMED = re.compile(rf"(?<![\w./<-])({'|'.join(sorted(GROUPS))})\.([a-z_]+(?:\.[a-z_]+)*)(?![\w./(<*{{]|\.\.\.)")
"""Something that may be a knob: ``loader.num_workers``, and no part of a path, a call or a module."""
CHOSEN = re.compile(rf"(?<![\w./+-])({'|'.join(sorted(OPTIONS))})=(\w+)(?![\w.,(])")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
FILE = re.compile(r"`((?:docs|src|tests|tools|benchmarks|configs)/[\w./-]+\.\w+)`")
MODULE = re.compile(r"`(wellfed(?:\.[a-z_]+)+)(?:\.[A-Z]\w*)?`")


def spans(text: str) -> str:
    """Code within sentences and tables, and what blocks show to be typed."""
    blocks = re.findall(r"^```(?:bash|text|yaml)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*blocks, *inline])


@cache
def messages() -> dict[str, str]:
    """Texts of the engine by its files: messages, help, docstrings."""
    found = {}
    for path in CODE:
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found[path.relative_to(ROOT).as_posix()] = "\n".join(
            text for text in texts if isinstance(text, str) and " " in text
        )
    return found


PAGES = [name for name in DOCUMENTS if name != "CHANGELOG.md"]
"""Pages of today: the changelog names what is gone, too."""
TEXTS = {**{name: spans(page(name)) for name in PAGES}, **messages()}
FOREIGN = frozenset(
    [
        *("memory.current", "memory.high", "memory.max"),  # of a cgroup
        *("memory.used", "paths.data_dir", "trainer.fit"),  # of nvidia-smi, lightning-hydra-template, Lightning
        *("telemetry.cpu_frac", "telemetry.machines", "telemetry.metrics"),  # a key of run.json, modules
        "gpu.foo",  # an example of a knob that does not exist
    ]
)
"""Names with a dot that are no knobs."""
OWN = frozenset(("mine", "flowers", "points", "photos", "NAME"))
"""Options that a reader makes."""
OTHERS_FLAGS = frozenset(
    [
        *("--nnodes", "--nproc-per-node", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"),
        *("--ntasks", "--nodes", "--signal", "--requeue", "--gpus", "--shm-size", "--ipc", "--rm", "--no-input"),
        *("--array", "--time", "--cpus-per-task", "--gpus-per-node", "--nodes", "--ntasks-per-node", "--depth"),
        *("--cpus", "--entrypoint", "--num-cpus", "--user", "--logdir", "--backend-store-uri"),
    ]
)
"""Flags of torchrun, Slurm, Docker, git, cookiecutter, TensorBoard and mlflow."""


@cache
def flags() -> frozenset[str]:
    """Flags that the engine, its tools and its benchmarks know."""
    files = [*CODE, *(path for name in ("tools", "benchmarks", "tests/faults") for path in (ROOT / name).glob("*.py"))]
    return frozenset(FLAG.findall("\n".join(path.read_text(encoding="utf-8") for path in files)))


def unknown_knobs(text: str) -> list[str]:
    names = {f"{group}.{rest}" for group, rest in NAMED.findall(text)}
    names = {name for name in names if not re.search(r"\.(json|csv|md|py|html|yaml)$|\._target_$", name)}
    free = {name for name in names for node in FREE_NODES if name.startswith(f"{node}.")}
    return sorted(names - KNOBS.keys() - free - FOREIGN)


def unknown_options(text: str) -> list[str]:
    chosen = {(group, option) for group, option in CHOSEN.findall(text) if not option.endswith("_")}
    return sorted(f"{group}={option}" for group, option in chosen if option not in OPTIONS[group] | OWN)


def missing_files(text: str) -> list[str]:
    """Files that are neither here nor in a project made from this template."""
    places = (ROOT, ROOT / "{{cookiecutter.project_slug}}")
    there = {name for name in FILE.findall(text) for place in places if (place / name).exists()}
    return sorted(name for name in set(FILE.findall(text)) - there if not MADE.search(name))


MADE = re.compile(r"/mine\b|NAME|/photos|mnist")
"""Names of files that a reader makes, or has in a project of lightning-hydra-template."""


def missing_modules(text: str) -> list[str]:
    """Modules of the engine, or names in them, that are not there."""
    return sorted(
        name for name in set(MODULE.findall(text)) if not (is_there(name) or is_there(name.rpartition(".")[0]))
    )


def is_there(name: str) -> bool:
    place = ROOT / "src" / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


@pytest.mark.parametrize("name", TEXTS)
def test_knobs_and_options_exist(name: str) -> None:
    assert unknown_knobs(TEXTS[name]) == []
    assert unknown_options(TEXTS[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_flags_files_and_modules_exist(name: str) -> None:
    assert sorted(set(FLAG.findall(TEXTS[name])) - flags() - OTHERS_FLAGS) == []
    assert missing_files(page(name)) == []
    assert missing_modules(page(name)) == []


def test_what_does_not_exist_is_found() -> None:
    text = "Set `loader.num_worker=3`, `gpu=9gb`, `workload.model.any=1`, `loader.py`, `gpu.memory_gib`."
    assert unknown_knobs(text) == ["loader.num_worker"]
    assert unknown_options(text) == ["gpu=9gb"]
    assert missing_files("see `tools/gone.py` and `tools/site.py`") == ["tools/gone.py"]
    assert missing_modules("`wellfed.explain.gone.away`, `wellfed.explain.report`") == ["wellfed.explain.gone.away"]
    assert "--no-such-flag" not in flags()
    assert {"--plan", "--for"} <= flags()
    assert len(KNOBS) > 80
    assert sum(bool(NAMED.search(text)) for text in TEXTS.values()) > 60
