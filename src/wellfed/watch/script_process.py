"""Runs a script in this process as ``python script.py`` or ``python -m package`` would, and catches how it ends.

Imports the standard library alone: a script may set variables that torch or numpy read when they are imported.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Script:
    """A script or a module, with its arguments."""

    name: str
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended."""

    exit_code: int
    error: BaseException | None = None
    """Exception that ended it; None if it returned or called ``sys.exit``."""

    @property
    def is_interrupt(self) -> bool:
        """Whether Ctrl-C ended it."""
        return isinstance(self.error, KeyboardInterrupt)


def run(script: Script) -> ScriptEnd:
    """Runs the script as ``__main__``. Prints the error that ended it, as Python does."""
    sys.argv = [script.name, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.name))
    try:
        if script.is_module:
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(script.name), run_name="__main__")
    except SystemExit as ended:
        return ScriptEnd(_exit_code(ended))
    except BaseException as error:  # noqa: BLE001  whatever the script raises ends it, not us
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # noqa: BLE001  a hook of the script's
            traceback.print_exc()
        return ScriptEnd(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1, error)
    return ScriptEnd(0)


def end_by_interrupt() -> None:
    """Ends this process by SIGINT after its exit handlers, as Python ends a script that Ctrl-C has stopped."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _exit_code(ended: SystemExit) -> int:
    """Returns the code that Python makes of the argument of ``sys.exit``; prints one that is no number."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def process_group() -> Any:
    """Returns torch.distributed if this process is in a group of ranks, else None. Imports nothing."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def when_torch_is_imported(call: Callable[[], None]) -> None:
    """Calls a function once torch is imported, or now if it is. Never imports it."""
    if "torch" in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _TorchFinder(call))


class _TorchFinder(MetaPathFinder):
    """Finder that calls a function after torch's own code has run, and then removes itself."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._is_searching = call, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of torch with our call; None for other modules. Libraries search it without an import."""
        if fullname != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            with suppress(ValueError):
                sys.meta_path.remove(self)
            self._call()

        loader.exec_module = exec_module
        return spec
