"""Finds lines where the host waits for the GPU within a step, by torch's debug mode during the warm-up."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from wellfed.errors import INSTALLED
from wellfed.record import SynchronisationEntry

WATCHED_STEPS = 2
"""Warm-up steps to watch; the first is skipped, since it allocates caches."""
_SAYS = "called a synchronizing CUDA operation"
_SAYS_OF_ITSELF = "Synchronization debug mode is a prototype"
_OWN_THREADS = "wellfed"
"""Prefix of the names of our threads, whose waits don't count."""
Side = Literal["user", "wellfed", "library", "machinery"]


class SynchronisationSearch:
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

    def step_ended(self) -> None:
        """Marks the end of a step."""
        if self._on_found is None:
            return
        self._num_ended += 1
        if self._num_ended == 1:
            self._watch()
        elif self._num_ended == 1 + WATCHED_STEPS:
            self._report()

    def go_on(self) -> None:
        """Continues after `pause`."""
        if self._num_ended and self._on_found is not None and self._caught is None:
            self._watch()

    def close(self) -> None:
        """Ends the search."""
        self._on_found = None
        self.pause()

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

    def pause(self) -> None:
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
    """Returns ``file:line`` of the nearest call in the user's code, else in a library that we call, else in ours.

    Returns None if all frames are in torch, Lightning or compiled code.
    """
    of_library: str | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        side = side_of(name)
        if side == "user" or (side == "library" and of_library is None):
            place = f"{_short(name)}:{frame.f_lineno}"
            if side == "user":
                return place
            of_library = place
        elif side == "wellfed":
            return of_library or f"wellfed/{Path(name).relative_to(_OURS)}:{frame.f_lineno}"
        elif name.startswith(_COMPILES):
            return None
        frame = frame.f_back
    return of_library


def _folder_of(package: str) -> str:
    """Returns the folder of an installed package, without importing it."""
    spec = find_spec(package)
    return "" if spec is None or spec.origin is None else os.path.dirname(spec.origin) + os.sep


_OURS, _TORCH, _LIGHTNING = map(_folder_of, ("wellfed", "torch", "lightning"))
_COMPILES = tuple(os.path.join(_TORCH, package) for package in ("_dynamo", "_inductor"))
_PYTHON = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], "<")


@cache
def side_of(file: str) -> Side:
    """Returns the owner of a file's code."""
    if file.startswith(_OURS):
        return "wellfed"
    if file.startswith((_TORCH, _LIGHTNING)) or "torchinductor" in file:
        return "machinery"
    if not INSTALLED.isdisjoint(Path(file).parts):
        return "library"
    return "machinery" if file.startswith(_PYTHON) else "user"


def _short(file: str) -> str:
    """Returns the path relative to the working folder, or to the folder of installed packages."""
    path = Path(file)
    for part in INSTALLED:
        if part in path.parts:
            return str(Path(*path.parts[path.parts.index(part) + 1 :]))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
