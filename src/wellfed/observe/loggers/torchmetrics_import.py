"""Lets Lightning import two classes of torchmetrics without all metrics, which take longer to import than torch."""

from __future__ import annotations

import logging
import sys
import threading
from importlib import import_module
from importlib.abc import Loader
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import numpy

_PLOT = "torchmetrics.utilities.plot"
"""Submodule that imports matplotlib, which `Metric.plot` alone needs."""


def defer_torchmetrics() -> None:
    """Imports ``Metric`` and ``MetricCollection``; ``torchmetrics/__init__.py`` runs when anything else is used.

    That file imports every metric, and for some of them scipy and transformers, where they are installed: 2 s of CPU
    time. It runs in its own module (PEP 562), so torchmetrics is complete for all who use it. Does nothing if
    torchmetrics is imported already, or if its files are laid out in another way.
    """
    spec = None if "torchmetrics" in sys.modules else find_spec("torchmetrics")
    if spec is None or (loader := spec.loader) is None:
        return
    package = sys.modules["torchmetrics"] = module_from_spec(spec)
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
        return import_module("torchmetrics.utilities.plot").plot_single_or_multi_val(*arguments, **named)

    substitute = ModuleType(_PLOT)
    types = {"_AX_TYPE": object, "_PLOT_OUT_TYPE": tuple[object, object]}
    vars(substitute).update(types, plot_single_or_multi_val=plot_single_or_multi_val)
    return substitute


class _Completion:
    """``__getattr__`` of a package whose ``__init__.py`` has not run: runs it, and removes itself."""

    def __init__(self, package: ModuleType, loader: Loader) -> None:
        self._package, self._loader = package, loader
        self._is_running, self._turn = False, threading.RLock()

    def __call__(self, name: str) -> Any:
        """Returns an attribute that the package gets from its ``__init__.py``."""
        package = self._package
        if not name.startswith("__") or name == "__all__":  # other such names are asked of every module
            with self._turn:
                if vars(package).get("__getattr__") is self and not self._is_running:
                    self._run()
        if name in vars(package):
            return vars(package)[name]
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

    def _run(self) -> None:
        self._is_running = True
        try:
            self._loader.exec_module(self._package)
        finally:
            self._is_running = False
        del self._package.__getattr__
