"""Finds lines where the host waits for the GPU within a step, by torch's debug mode during the warm-up."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from wellfed.errors import is_the_users
from wellfed.record.entries import SynchronisationEntry

WATCHED_STEPS = 2
"""Warm-up steps to watch; the first is skipped, since it allocates caches."""
_SAYS = "called a synchronizing CUDA operation"


def find_synchronisations(on_found: Callable[[list[SynchronisationEntry]], None]) -> Generator[None]:
    """Searches from the end of the first step to the end of the third. Call ``next`` at the end of each step; ``close``
    ends it without a report.

    Args:
        on_found: called once with the lines found.
    """
    places: Counter[str] = Counter()

    def show(message: Warning | str, *about: Any, **more: Any) -> None:
        if not str(message).startswith(_SAYS):
            others(message, *about, **more)
        elif (place := place_of(sys._getframe(1))) is not None:
            places[place] += 1

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", _SAYS)
        others, warnings.showwarning = warnings.showwarning, show
        try:
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(WATCHED_STEPS):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    on_found([{"place": place, "per_step": number / WATCHED_STEPS} for place, number in places.most_common()])


def place_of(frame: FrameType | None) -> str | None:
    """Returns ``file:line`` of the nearest call in the user's code; None if there is none."""
    while frame is not None and not is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{frame.f_lineno}"
