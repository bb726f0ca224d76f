"""Detects training that fits only because the allocator returns its cache to the device in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch

STEPS = 2
"""Number of successive steps with such retries. A single one may come from a longest batch or a first validation."""


class Thrash:
    """Counter of steps in which the allocator had to free its cache and retry. Such a step waits for the device and is
    many times slower. Counting does not wait."""

    def __init__(self, device: torch.device, retries: Callable[[], int] | None = None) -> None:
        """``retries``: returns the allocator's count; None = torch's count for the device."""
        stats = torch.cuda.memory_stats_as_nested_dict
        self._retries = retries or (lambda: int(stats(device).get("num_alloc_retries", 0)))
        self._count = self._retries()
        self._in_a_row = 0

    def after_step(self) -> bool:
        """Returns whether all of the last `STEPS` steps had retries, and then restarts the count."""
        count = self._retries()
        self._in_a_row = self._in_a_row + 1 if count > self._count else 0
        self._count = count
        if self._in_a_row < STEPS:
            return False
        self._in_a_row = 0
        return True
