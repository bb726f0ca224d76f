"""Finds lines where the host waits for the GPU within a step, by torch's debug mode during the warm-up."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from wellfed.errors import is_the_users
from wellfed.record.entries import SynchronisationEntry

WATCHED_STEPS = 2
"""Warm-up steps to watch; the first is skipped, since it allocates caches."""
_SAYS = "called a synchronizing CUDA operation"


class SyncSearch:
    """Search from the end of the first step to the end of the third. A `close` before ends it without a report.

    Warnings are global to the process; others are shown as usual.

    Args:
        on_found: called once with the lines found.
    """

    def __init__(self, on_found: Callable[[list[SynchronisationEntry]], None]) -> None:
        self._on_found, self._num_ended = on_found, 0
        self._places: Counter[str] = Counter()
        self._caught: warnings.catch_warnings[None] | None = None

    def step_ended(self) -> None:
        """Counts a step."""
        self._num_ended += 1
        if self._num_ended == 1:
            self._watch()
        elif self._num_ended == 1 + WATCHED_STEPS and self._caught is not None:
            self.close()
            found = self._places.most_common()
            self._on_found([{"place": place, "per_step": number / WATCHED_STEPS} for place, number in found])

    def close(self) -> None:
        """Ends the search."""
        self._num_ended += 1 + WATCHED_STEPS
        caught, self._caught = self._caught, None
        if caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            caught.__exit__(None, None, None)

    def _watch(self) -> None:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", _SAYS)
        others = warnings.showwarning

        def show(message: Warning | str, *about: Any, **more: Any) -> None:
            if not str(message).startswith(_SAYS):
                others(message, *about, **more)
            elif not threading.current_thread().name.startswith("wellfed"):  # our own threads don't hold up a step
                self._places.update(filter(None, [place_of(sys._getframe(1))]))

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")


def place_of(frame: FrameType | None) -> str | None:
    """Returns ``file:line`` of the nearest call in the user's code; None if there is none."""
    while frame is not None and not is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{frame.f_lineno}"
