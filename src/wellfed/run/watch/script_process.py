"""Runs a script in this process as ``python script.py`` or ``python -m package`` would, and catches how it ends.

Imports the standard library alone: a script may set variables that torch or numpy read when they are imported.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from wellfed.project import ENGINE

_OURS = str(ENGINE) + os.sep


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
    """Runs the script as ``__main__``, and waits for its threads. Prints the error that ended it, as Python does."""
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main  # stays: objects of the script's classes are pickled by it
    sys.argv = ["-m" if script.is_module else script.name, *script.arguments]
    try:
        _execute(script, main)
        _join_threads()
    except SystemExit as ended:
        _join_threads()
        return ScriptEnd(_exit_code(ended))
    except BaseException as error:  # noqa: BLE001  whatever the script raises ends it, not us
        _without_our_frames(error)
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:  # as Python, whose hook may exit
            return ScriptEnd(_exit_code(ended), error)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        _join_threads()
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


def _execute(script: Script, main: ModuleType) -> None:
    if script.is_module:
        _set_first_path(os.getcwd())
        runpy._run_module_as_main(script.name)  # type: ignore[attr-defined]  # what ``python -m`` calls
        return
    path = os.path.abspath(script.name)
    if os.path.isdir(path) or pkgutil.get_importer(path) is not None:  # a folder or zip file with a __main__.py
        _set_first_path(path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None)
    with io.open_code(path) as stream:
        source = stream.read()
    code: CodeType = compile(source, path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _exit_code(ended: SystemExit) -> int:
    """Returns the code that Python makes of the argument of ``sys.exit``; prints one that is no number."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code
    with suppress(OSError, ValueError):
        print(ended.code, file=sys.stderr)
    return 1


def _join_threads() -> None:
    """Waits for the script's threads, as Python does at its end. Executors then take no more work, and end theirs."""
    hooks = threading._threading_atexits  # type: ignore[attr-defined]
    while hooks:
        hooks.pop()()
    while threads := [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]:
        for thread in threads:
            thread.join()


def _without_our_frames(error: BaseException) -> None:
    """Removes the frames of this package from the tracebacks of an error and its causes."""
    seen, left = set[int](), [error]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _trimmed(one.__traceback__)
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def _trimmed(found: TracebackType | None) -> TracebackType | None:
    kept = []
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(found)
        found = found.tb_next
    for one, following in zip(kept, [*kept[1:], None], strict=False):
        one.tb_next = following
    return kept[0] if kept else None


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
