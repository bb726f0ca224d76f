"""Finds the project that a process belongs to: its configurations, its code, and the engine it uses.

A project is a folder with ``configs/train.yaml``; its own packages lie in ``src/``. The engine is this package.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from wellfed import __version__
from wellfed.errors import INSTALLED, ConfigError

ENGINE = Path(__file__).resolve().parent
VARIABLE = "WELLFED_PROJECT"
"""Environment variable that names the project if no script of one was started."""
_MARK = Path("configs", "train.yaml")
_PIN = re.compile(r"wellfed\s*(?:\[[^\]]*\])?\s*==\s*([\w.+!-]+)\s*(?:;.*)?")


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


def two_named() -> str | None:
    """Returns a sentence if `VARIABLE` and the working directory name different projects, else None."""
    named, around = os.environ.get(VARIABLE), _around(Path.cwd())
    if not named or around is None or _script_project() is not None:
        return None
    used = Path(named).expanduser().absolute()
    if used.resolve() == around.resolve() or not (used / _MARK).is_file():
        return None
    return f"{VARIABLE} names the project: {used}, not {around}, the one that you stand in. Unset it to use that one."


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


def pinned_engine() -> str | None:
    """Returns the version of wellfed that the project's pyproject.toml pins; None without a pin or a project."""
    try:
        path = root() / "pyproject.toml"
        asked = _dependencies(path, path.stat().st_mtime_ns)
    except (ConfigError, OSError, ValueError, AttributeError):
        return None
    pins = (_PIN.fullmatch(str(each).strip()) for each in asked)
    return next((pin[1] for pin in pins if pin), None)


@cache
def _dependencies(path: Path, changed_ns: int) -> Sequence[Any]:
    """Returns the dependencies of a pyproject.toml that was last changed at that time."""
    found: Sequence[Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}).get("dependencies", [])
    return found


def engine_doubt() -> str | None:
    """Returns why this process may run another engine than the project pins, with the way out; else None."""
    pinned = pinned_engine()
    if pinned is not None and pinned != __version__:
        return (
            f"pyproject.toml pins wellfed {pinned}, and this process runs wellfed {__version__} of {ENGINE}. "
            "make install installs the one that is pinned; make engine FROM=... pins another."
        )
    installed = _installed_engine()
    if installed is not None and installed[0].resolve() != ENGINE:
        where, version = installed
        return (
            f"two engines: this process runs wellfed {__version__} of {ENGINE}, and wellfed {version} of {where} is "
            "installed in this environment. Remove one of them, or the folder on PYTHONPATH that comes first."
        )
    return None


@cache
def _installed_engine() -> tuple[Path, str] | None:
    """Returns folder and version of the installed wellfed; the checkout's folder if the installation is editable."""
    try:
        found = Distribution.from_name("wellfed")
        url = json.loads(found.read_text("direct_url.json") or "{}")
        version = found.version
    except (PackageNotFoundError, OSError, ValueError):
        return None
    if url.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(url["url"]).path)) / "src" / "wellfed", version
    return Path(str(found.locate_file("wellfed"))), version


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
