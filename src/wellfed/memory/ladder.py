"""The micro-batch size of a run and its way down when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence


class MicroBatches:
    """How the samples of one optimizer step are split, and what comes after an out-of-memory error.

    State: a size that only goes down. ``step_down`` moves to the next of ``steps`` below the size, or to half of it;
    at 1 there is no way down.
    """

    def __init__(self, size: int, steps: Sequence[int] | None = None) -> None:
        self.size = size
        self.tried = [size]
        self._steps = None if steps is None else sorted((step for step in steps if step < size), reverse=True)

    def sizes(self, num_samples: int) -> list[int]:
        """Micro-batch sizes that add up to ``num_samples``; the last is what is left."""
        full, rest = divmod(num_samples, self.size)
        return [self.size] * full + ([rest] if rest else [])

    def step_down(self) -> int | None:
        """The next smaller size, or None if there is none."""
        if self._steps:
            self.size = self._steps.pop(0)
        elif self._steps is None and self.size > 1:
            self.size //= 2
        else:
            return None
        self.tried.append(self.size)
        return self.size
