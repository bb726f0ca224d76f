"""Chooses the next way to need less memory: smaller micro-batches, then slower ways of training. Each is permanent."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class MicroBatches:
    """Size of the micro-batches that an optimizer step is split into. It only goes down, to 1 at least. If the steps
    are whole, none is split before the first step down, also one with more rows than the size."""

    def __init__(self, size: int, *, is_whole: bool = False) -> None:
        self.size, self._is_whole = size, is_whole
        self.tried = [size]

    def sizes(self, num_samples: int) -> list[int]:
        """Returns micro-batch sizes that add up to ``num_samples``; the last is the rest."""
        if self._is_whole:
            return [num_samples]
        full, rest = divmod(num_samples, self.size)
        return [self.size] * full + ([rest] if rest else [])

    def step_down(self) -> int | None:
        """Halves the size and returns it; None if it is 1."""
        if self.size == 1:
            return None
        self.size, self._is_whole = self.size // 2, False
        self.tried.append(self.size)
        return self.size


class Fallbacks:
    """Smaller micro-batches, then other ways of training that need less memory and learn the same. Each is taken once.

    Args:
        others: changes in order. The override that has the same effect, such as ``memory.features=dynamic`` -> a
            function that makes the change, or returns False if there is nothing to change.
    """

    def __init__(self, micro: MicroBatches, others: Mapping[str, Callable[[], bool]] = {}) -> None:
        self.micro, self._others = micro, dict(others)
        self._taken: list[str] = []

    def step_down(self) -> dict[str, object] | None:
        """Takes the next fallback; returns the facts of the change, or None if none is left."""
        before, smaller = self.micro.size, self.micro.step_down()
        if smaller is not None:
            return {"micro_batch": smaller, "before": before}
        while self._others:
            change = next(iter(self._others))
            if self._others.pop(change)():
                self._taken.append(change)
                return {"change": change}
        return None

    def changes(self) -> dict[str, object]:
        """Returns the knobs whose values differ from those at the start of training."""
        changed: dict[str, object] = {"memory.micro_batch": self.micro.size} if len(self.micro.tried) > 1 else {}
        for change in self._taken:
            knob, _, value = change.partition("=")
            changed[knob] = True if value == "true" else value
        return changed

    def tried(self) -> str:
        """Returns everything tried, for a message: ``micro-batches of 4 -> 2 -> 1, then memory.features=dynamic``."""
        sizes = " -> ".join(map(str, self.micro.tried))
        return ", then ".join([f"micro-batches of {sizes}", *self._taken])
