"""Finds the project that a process belongs to: its configurations, its code, and the engine it uses.

A project is a folder with ``configs/train.yaml``; its own packages lie in ``src/``. The engine is this package.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path

from wellfed.errors import INSTALLED, ConfigError

ENGINE = Path(__file__).resolve().parent
VARIABLE = "WELLFED_PROJECT"
"""Environment variable that names the project if no script of one was started."""
_MARK = Path("configs", "train.yaml")


def root() -> Path:
    """Returns the folder of the project, absolute.

    Candidates in this order: the project of the started script, the folder in `VARIABLE`, the nearest project around
    the working directory. Scripts of an environment, such as ``.venv/bin/wellfed``, belong to no project.

    Raises:
        ConfigError: there is no project.
    """
    if (found := _script_project()) is not None:
        return found
    if named := os.environ.get(VARIABLE):
        folder = Path(named).expanduser().absolute()
        if not (folder / _MARK).is_file():
            raise ConfigError.of(
                f"{VARIABLE}={named}", f"has no {_MARK}.", "Name the folder of a project, or unset it."
            )
        return folder
    if (found := _around(Path.cwd())) is not None:
        return found
    raise ConfigError.of(
        "project",
        f"neither {Path.cwd()} nor a folder around it has {_MARK}.",
        f"Change to the folder of a project, or name it: {VARIABLE}=<folder>.",
    )


def configs() -> Path:
    """Returns the project's folder of configurations; raises as `root`."""
    return root() / _MARK.parent


def sources() -> Path:
    """Returns the folder of the project's own packages; raises as `root`."""
    return root() / "src"


def add_sources() -> None:
    """Puts the project's packages first on sys.path, as ``python src/train.py`` does. A no-op without a project."""
    with suppress(ConfigError):
        folder = str(sources())
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)


def is_engine_within(folder: Path) -> bool:
    """Returns whether the engine is part of that checkout, not an installed package."""
    return ENGINE.is_relative_to(folder.resolve()) and not is_engine_installed()


def is_engine_installed() -> bool:
    """Returns whether the engine is installed as a package, not run from a checkout."""
    return not INSTALLED.isdisjoint(ENGINE.parts)


def import_paths() -> list[Path]:
    """Returns the paths that another process must import from, the project's packages first; raises as `root`."""
    return list(dict.fromkeys([sources(), *([] if is_engine_installed() else [ENGINE.parent])]))


def source_digest() -> str:
    """Returns a digest of all Python files that a run may execute, the project's and the engine's; raises as `root`."""
    digest = hashlib.sha256()
    for folder in dict.fromkeys([sources().resolve(), ENGINE]):
        for path in sorted(folder.rglob("*.py")):
            with suppress(OSError):  # an editor's lock is a link to nothing
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + content)
    return digest.hexdigest()[:16]


def _script() -> Path | None:
    """Returns the file that Python was started with, unless an environment installed it."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return None
    script = Path(file).absolute()
    if not INSTALLED.isdisjoint(script.parts):  # in an environment that this one includes, e.g. pytest's
        return None
    return None if any(script.resolve().is_relative_to(each) for each in (*_environment(), ENGINE)) else script


@cache
def _environment() -> list[Path]:
    """Returns the folders of this environment's scripts and packages."""
    return [Path(sysconfig.get_path(name)).resolve() for name in ("scripts", "stdlib", "purelib", "platlib")]


def _script_project() -> Path | None:
    script = _script()
    return None if script is None else _around(script.parent)


def _around(folder: Path) -> Path | None:
    return next((each for each in (folder, *folder.parents) if (each / _MARK).is_file()), None)
