"""The doors to foreign libraries, for all of src: entry scripts, Hydra plugins and imports by name too.

import-linter (make check) holds the same for static imports of ``wellfed`` and ``workloads``; it sees neither
``importlib.import_module("pynvml")`` nor files outside these two packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
DOORS = {
    "pynvml": ("wellfed/observe/nvml/",),
    "lightning": (
        "wellfed/train/lightning/",
        "wellfed/observe/loggers/lightning_loggers.py",
        "wellfed/monitor/gpu_curves.py",
    ),
    "pytorch_lightning": (),
    "lightning_fabric": (),
    "wandb": ("wellfed/observe/loggers/",),
    "hydra": ("wellfed/config/", "hydra_plugins/"),
    "omegaconf": ("wellfed/config/", "hydra_plugins/"),
    "optuna": ("wellfed/study/points/optuna_study.py",),
    "pytest": ("wellfed/testing/",),
    "workloads": ("workloads/",),
}
BY_VARIABLE = {
    "wellfed/__init__.py": "imports the public names of its own table",
    "wellfed/config/build.py": "imports what a _target_ of the configuration names",
    "wellfed/config/faults/target_faults.py": "imports what a _target_ of the configuration names, to check it",
    "wellfed/cli/main.py": "imports the commands of its own table",
}
"""Files that may call import_module with something else than a literal name, and why."""
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))


def imports(source: str) -> Iterator[str | None]:
    """Every module that the source imports, by statement or by name; None = by a name that is not written there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                first = node.args[0] if node.args else None
                yield first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


@cache
def imports_of(file: str) -> list[str | None]:
    """The same of a file below src/."""
    return [*imports((SRC / file).read_text(encoding="utf-8"))]


def test_files_are_found():
    assert len(FILES) > 80
    assert {"train.py", "evaluate.py", "tune.py", "wellfed/observe/nvml/session.py"} <= set(FILES)


def test_foreign_libraries_come_through_their_door():
    used, wrong = set(), []
    for file in FILES:
        for module in imports_of(file):
            package = (module or "").partition(".")[0]
            doors = DOORS.get(package, ("",))
            used |= {package} & DOORS.keys()
            if module is None and file not in BY_VARIABLE:
                wrong.append(f"{file} imports a module by a name that can't be read here")
            elif module is not None and not file.startswith(doors or ("-",)):
                wrong.append(f"{file} imports {module}; only {doors or 'nobody'} may")
    assert wrong == []
    # A door that nobody goes through is a leftover, or this test is blind.
    assert used == {package for package, doors in DOORS.items() if doors}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pynvml", ["pynvml"]),
        ("def f():\n    from lightning.pytorch import Trainer", ["lightning.pytorch"]),
        ("importlib.import_module('wandb')", ["wandb"]),
        ("import_module(name)", [None]),
        ("__import__('hydra.core')", ["hydra.core"]),
        ("if TYPE_CHECKING:\n    import lightning", ["lightning"]),
    ],
)
def test_no_way_of_importing_is_missed(source: str, found: list[str | None]):
    assert list(imports(source)) == found
