"""Finds lines where the host waits for the GPU within a step, by torch's debug mode during the warm-up."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed.errors import INSTALLED
from wellfed.record.entries import SynchronisationEntry
from wellfed.train.lightning.callbacks.clock import is_within_step

WATCHED_STEPS = 2
"""Warm-up steps to watch; the first is skipped, since it allocates caches."""
_SAYS = "called a synchronizing CUDA operation"
_SAYS_OF_ITSELF = "Synchronization debug mode is a prototype"
_OWN_THREADS = "wellfed"
"""Prefix of the names of our threads, whose waits don't count."""


class Synchronisations(pl.Callback):
    """Search from the end of the first step to the end of the third. Call `close` however training ends.

    Warnings are global to the process. Other warnings, and those of our threads, are shown as usual.

    Args:
        on_found: called once with the lines found, unless training ends before.
    """

    def __init__(self, on_found: Callable[[list[SynchronisationEntry]], None]) -> None:
        self._on_found: Callable[[list[SynchronisationEntry]], None] | None = on_found
        self._places: Counter[str] = Counter()
        self._num_ended = 0
        self._mode_before = 0
        self._caught: warnings.catch_warnings[None] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._on_found is None or is_within_step(trainer):
            return
        self._num_ended += 1
        if self._num_ended == 1:
            self._watch()
        elif self._num_ended == 1 + WATCHED_STEPS:
            self._report()

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._pause()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._num_ended and self._on_found is not None and self._caught is None:
            self._watch()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the search."""
        self._on_found = None
        self._pause()

    def _watch(self) -> None:
        self._mode_before = torch.cuda.get_sync_debug_mode()
        if self._mode_before != 0:  # other code uses this mode
            self.close()
            return
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.filterwarnings("ignore", _SAYS_OF_ITSELF)
        warnings.filterwarnings("always", _SAYS)
        warnings.showwarning = self._show_to(warnings.showwarning)
        torch.cuda.set_sync_debug_mode("warn")

    def _pause(self) -> None:
        """Restores mode and warnings until a validation is over."""
        caught, self._caught = self._caught, None
        if caught is not None:
            torch.cuda.set_sync_debug_mode(self._mode_before)
            caught.__exit__(None, None, None)

    def _report(self) -> None:
        on_found = self._on_found
        self.close()
        if on_found is not None:
            found = self._places.most_common()
            on_found([{"place": place, "per_step": number / WATCHED_STEPS} for place, number in found])

    def _show_to(self, others: Callable[..., None]) -> Callable[..., None]:
        """Returns a replacement of ``warnings.showwarning``; ``others`` shows all other warnings."""

        def show(message: Warning | str, *about: Any, **more: Any) -> None:
            if not str(message).startswith(_SAYS):
                others(message, *about, **more)
            elif self._caught is not None and not threading.current_thread().name.startswith(_OWN_THREADS):
                place = place_of(sys._getframe(1))
                if place is not None:
                    self._places[place] += 1

        return show


def place_of(frame: FrameType | None) -> str | None:
    """Returns ``file:line`` of the nearest call outside of torch, Lightning and Python's own library.

    Returns None for a wait while torch compiles, or if there is no such call.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COMPILES):
            return None
        if not _is_passed_over(name):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _folder_of(package: str) -> str:
    """Returns the folder of an installed package, without importing it."""
    spec = find_spec(package)
    return "" if spec is None or spec.origin is None else os.path.dirname(spec.origin) + os.sep


_TORCH, _LIGHTNING = _folder_of("torch"), _folder_of("lightning")
_COMPILES = tuple(os.path.join(_TORCH, package) for package in ("_dynamo", "_inductor"))
_PYTHON = os.path.dirname(os.__file__)
_SOURCES = Path(__file__).parents[4]
"""Folder that holds our package."""


def _is_passed_over(file: str) -> bool:
    """Returns whether a file is of torch, Lightning or Python, or generated."""
    if file.startswith((_TORCH, _LIGHTNING, "<")) or "torchinductor" in file:
        return True
    return file.startswith(_PYTHON) and INSTALLED.isdisjoint(Path(file).parts)


def _short(file: str) -> str:
    """Returns the path relative to the folder of installed packages, of our package, or to the working folder."""
    path = Path(file)
    for part in INSTALLED:
        if part in path.parts:
            return str(Path(*path.parts[path.parts.index(part) + 1 :]))
    folder = next((one for one in (_SOURCES, Path.cwd()) if path.is_relative_to(one)), None)
    return file if folder is None else str(path.relative_to(folder))
