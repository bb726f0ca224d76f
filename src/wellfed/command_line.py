"""Reads how this process was started: by the command ``wellfed``, or by an entry script such as ``src/train.py``.

Everything is in ``sys.argv``, since Lightning starts the other ranks with the same arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ENTRIES = ("train", "tune", "evaluate")
"""Commands that a project also has as a script, ``src/<name>.py``."""
_MODULE = Path(__file__).with_name("__main__.py")


def is_command() -> bool:
    """Returns whether the first argument names a command: ``wellfed train``, not ``src/train.py``."""
    return _is_script() or Path(sys.argv[0]).absolute() == _MODULE


def is_started_by(name: str) -> bool:
    """Returns whether this process was started by ``wellfed <name>`` or ``src/<name>.py``."""
    return sys.argv[1:2] == [name] if is_command() else Path(sys.argv[0]).stem == name


def typed_arguments() -> list[str]:
    """Returns the arguments after the name of the command, or after the script."""
    return sys.argv[2 if is_command() else 1 :]


def set_arguments(new: Sequence[str], script: Path | None = None) -> None:
    """Changes the arguments with which the other ranks are started.

    Args:
        script: entry script to start instead of this one, e.g. ``src/train.py``; a command takes its name.
    """
    if is_command():
        sys.argv[1:] = [*([script.stem] if script else sys.argv[1:2]), *new]
    else:
        sys.argv[:] = [str(script or sys.argv[0]), *new]


def command(name: str) -> str:
    """Returns how this user types a command: ``wellfed train`` if started that way, else ``python src/train.py``.

    Commands without a script are ``wellfed plan``, else ``python -m wellfed plan``.
    """
    if _is_script():
        return f"wellfed {name}"
    return f"python src/{name}.py" if name in ENTRIES else f"python -m wellfed {name}"


def _is_script() -> bool:
    return Path(sys.argv[0]).stem.lower() == "wellfed"


def announce(what: str) -> None:
    """Prints the current activity if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
