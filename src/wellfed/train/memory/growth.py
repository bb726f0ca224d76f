"""Recognises memory that grows with every step, as if something kept tensors of past steps."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import psutil
import torch

from wellfed.units import GIB, MIB

_DENSE, _EVERY_FIRST, _EVERY = 32, 4, 32
"""Steps with a reading every `_EVERY_FIRST` steps, and steps between later readings. A reading takes 10 to 50 us."""
_FEWEST, _MOST = 4, 8
"""Minimum and maximum number of latest readings that are compared."""
_SMALLEST_FRAC = 0.05
"""Minimum growth since the first reading, as a fraction of the memory in use."""
_STEADY_FRAC = 0.5
"""Minimum growth a step between two readings, as a fraction of the mean."""


class MemoryGrowth:
    """Readings of the memory in use after steps: what the allocator has given out, on a CPU the process's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: tuple[int, int] | None = None
        self._latest: deque[tuple[int, int]] = deque(maxlen=_MOST)
        """Step and bytes of the latest readings."""

    def _read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)

    def note(self, step: int) -> None:
        """Reads the memory after some of the steps; call it after each."""
        if step % (_EVERY_FIRST if step <= _DENSE else _EVERY) == 0:
            self._latest.append((step, self._read()))
            self._first = self._first or self._latest[-1]

    def describe(self) -> str:
        """Returns the growth in a sentence with the way out; empty unless memory grew between all latest readings."""
        if self._first is None or len(self._latest) < _FEWEST:
            return ""
        (first, first_bytes), (last, last_bytes) = self._first, self._latest[-1]
        mean = (last_bytes - first_bytes) / (last - first)
        slopes = [(late - early) / (end - start) for (start, early), (end, late) in pairwise(self._latest)]
        if min(slopes) < _STEADY_FRAC * mean or last_bytes - first_bytes < _SMALLEST_FRAC * last_bytes:
            return ""
        return (
            f"Memory grew with every step, by {mean / MIB:.3g} MiB a step over {last - first} steps, from "
            f"{first_bytes / GIB:.2f} to {last_bytes / GIB:.2f} GiB: something keeps tensors of past steps, such as a "
            "list of losses or outputs that were not detached. Keep loss.item() or loss.detach().cpu(). A smaller "
            "micro-batch would only delay it."
        )
