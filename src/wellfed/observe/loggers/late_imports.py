"""Lets Lightning do without two packages until something uses them: all of torchmetrics, and the compiler of torch.

Each takes as long to import as torch itself. A package is complete for all who use more of it than Lightning's imports
do (PEP 562).
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec, module_from_spec
from types import FunctionType, ModuleType
from typing import Any

import numpy

_PLOT = "torchmetrics.utilities.plot"
"""Submodule that imports matplotlib, which `Metric.plot` alone needs."""


def _not_run(name: str) -> tuple[ModuleType, Loader] | None:
    """Returns a package whose file has not run, as imported, and what runs it; None if it is imported or absent."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return None
    package = sys.modules[name] = module_from_spec(spec)
    return package, spec.loader


def defer_torchmetrics() -> None:
    """Imports ``Metric`` and ``MetricCollection``; ``torchmetrics/__init__.py`` runs when anything else is used.

    That file imports every metric, and for some of them scipy and transformers, where they are installed: 2 s of CPU
    time. It runs in its own module (PEP 562), so torchmetrics is complete for all who use it. Does nothing if
    torchmetrics is imported already, or if its files are laid out in another way.
    """
    if (found := _not_run("torchmetrics")) is None:
        return
    package, loader = found
    package._logger = logging.getLogger("torchmetrics")  # type: ignore[attr-defined]
    sys.modules[_PLOT] = _without_matplotlib()
    try:
        package.__version__ = import_module("torchmetrics.__about__").__version__  # type: ignore[attr-defined]
        import_module("torchmetrics.utilities")  # metric.py can't be imported before it
        package.Metric = import_module("torchmetrics.metric").Metric  # type: ignore[attr-defined]
        package.MetricCollection = import_module("torchmetrics.collections").MetricCollection  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  Lightning then imports torchmetrics as usual
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchmetrics"]:
            del sys.modules[name]
        return
    numpy.Inf = numpy.inf  # type: ignore[attr-defined]  # that file sets it, and users' code may count on it
    del sys.modules[_PLOT]  # the first who needs it imports the real one
    package.__getattr__ = _Completion(package, loader)  # type: ignore[method-assign]


def _without_matplotlib() -> ModuleType:
    """Returns a substitute for `_PLOT` with its types as without matplotlib, whose function calls the real one."""

    def plot_single_or_multi_val(*arguments: Any, **named: Any) -> Any:
        return import_module(_PLOT).plot_single_or_multi_val(*arguments, **named)

    substitute = ModuleType(_PLOT)
    types = {"_AX_TYPE": object, "_PLOT_OUT_TYPE": tuple[object, object]}
    vars(substitute).update(types, plot_single_or_multi_val=plot_single_or_multi_val)
    return substitute


class _Completion:
    """``__getattr__`` of a package whose ``__init__.py`` has not run: runs it, and removes itself."""

    def __init__(self, package: ModuleType, loader: Loader, done: Callable[[], None] = lambda: None) -> None:
        """``done``: called once the file has run."""
        self._package, self._loader, self._done = package, loader, done
        self._has_begun, self._turn = False, threading.RLock()

    def __call__(self, name: str) -> Any:
        """Returns an attribute that the package gets from its ``__init__.py``."""
        package = self._package
        if not name.startswith("__") or name == "__all__":  # other such names are asked of every module
            self.complete()
        if name in vars(package):
            return vars(package)[name]
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

    def complete(self, *, waits: bool = True) -> None:
        """Runs ``__init__.py`` once. Waits for another thread that runs it."""
        if not self._turn.acquire(blocking=waits):
            return
        try:
            if not self._has_begun:
                self._has_begun = True
                try:
                    self._loader.exec_module(self._package)
                except BaseException:
                    self._has_begun = False  # the next use raises the same error
                    raise
                del self._package.__getattr__
                self._done()
        finally:
            self._turn.release()

    @property
    def is_due(self) -> bool:
        """Whether the file has not run to its end."""
        return vars(self._package).get("__getattr__") is self


def defer_dynamo() -> None:
    """Lets Lightning and optimizers use ``torch._dynamo`` without its files; these run when anything else is used.

    That is the tracer of `torch.compile`, 800 modules with sympy, half of what Lightning's import takes. Optimizers and
    Lightning need three functions of it, which do nothing while nothing is traced, and a class that they compare with.
    Does nothing if the package is imported already.
    """
    if (found := _not_run(_DYNAMO)) is None:
        return
    package, loader = found
    late: list[tuple[Any, list[Any], Callable[[Any], Any]]] = []

    def make_real() -> None:
        for untraced, called, disabled in late:
            called[0] = disabled(called[0])
            untraced._torchdynamo_disable = True  # as the real function marks what it returns
        sys.meta_path.remove(finder)

    completion = _Completion(package, loader, make_real)
    finder = _SubmoduleFinder(completion)

    def disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return functools.partial(disable, recursive=recursive, **options)
        if not isinstance(function, FunctionType) or not completion.is_due:
            completion.complete()
            return vars(package)["disable"](function, recursive, **options)
        called = [function]

        @functools.wraps(function)
        def untraced(*arguments: Any, **named: Any) -> Any:
            return called[0](*arguments, **named)

        late.append((untraced, called, lambda each: vars(package)["disable"](each, recursive, **options)))
        return untraced

    vars(package).update(
        disable=disable, graph_break=lambda msg="": None, is_compiling=lambda: False, OptimizedModule=_CompiledModule
    )
    package.__getattr__ = completion  # type: ignore[method-assign]
    sys.meta_path.insert(0, finder)


_DYNAMO = "torch._dynamo"


class _SubmoduleFinder(MetaPathFinder):
    """Completes ``torch._dynamo`` before the first of its submodules is imported, as the import system would."""

    def __init__(self, completion: _Completion) -> None:
        self._completion = completion

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith(f"{_DYNAMO}."):
            self._completion.complete(waits=False)  # another thread may run it, and import this one


class _IsCompiled(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        real = vars(sys.modules[_DYNAMO])["OptimizedModule"]
        return real is not cls and isinstance(instance, real)


class _CompiledModule(metaclass=_IsCompiled):
    """Stands for ``OptimizedModule``: its instances are those of the real class, if that is imported."""
