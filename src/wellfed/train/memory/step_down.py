"""Chooses the next way to need less memory: smaller micro-batches, then slower ways of training. Each is permanent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from wellfed.train.memory import oom


class MicroBatches:
    """Size of the micro-batches that an optimizer step is split into. It only goes down, to 1 at least."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tried = [size]

    def sizes(self, num_samples: int) -> list[int]:
        """Returns micro-batch sizes that add up to ``num_samples``; the last is the rest."""
        full, rest = divmod(num_samples, self.size)
        return [self.size] * full + ([rest] if rest else [])

    def step_down(self) -> int | None:
        """Halves the size and returns it; None if it is 1."""
        if self.size == 1:
            return None
        self.size //= 2
        self.tried.append(self.size)
        return self.size


@dataclass(frozen=True)
class Fallback:
    """Another way of training that needs less memory and learns the same."""

    change: str
    """Override that has the same effect: ``memory.features=dynamic``."""
    take: Callable[[], bool]
    """Makes the change; returns False if there is nothing to change. May raise memory errors."""
    frees_held: bool = False
    """Also frees memory that is held between passes, not only memory of the passes."""


class Fallbacks:
    """Smaller micro-batches, then other fallbacks, in order, each once."""

    def __init__(self, micro: MicroBatches, others: Sequence[Fallback] = ()) -> None:
        self.micro, self._others = micro, list(others)
        self._taken: list[str] = []
        self._changes: dict[str, object] = {}

    def step_down(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, object] | None:
        """Takes the next fallback; returns the facts of the change, or None if none is left.

        Args:
            optimizer: memory ran out in its step. Weights and states don't get smaller with the micro-batch, which is
                the last resort then. None = memory ran out in the passes.
        """
        if optimizer is None:
            return self._halve() or self._take(self._others)
        if one_weight_at_a_time(optimizer):
            return self._note("workload.optimizer.foreach=false")
        of_held = [other for other in self._others if other.frees_held]
        return self._take(of_held) or self._halve() or self._take(self._others)

    def _halve(self) -> dict[str, object] | None:
        before, smaller = self.micro.size, self.micro.step_down()
        return None if smaller is None else {"micro_batch": smaller, "before": before}

    def _take(self, others: Iterable[Fallback]) -> dict[str, object] | None:
        for other in list(others):
            self._others.remove(other)
            has_changed, failure = oom.Attempts()(other.take)
            if failure is not None:
                oom.release()
                self._taken.append(f"{other.change} (for which memory did not suffice itself)")
            elif has_changed:
                return self._note(other.change)
        return None

    def _note(self, change: str) -> dict[str, object]:
        self._taken.append(change)
        knob, _, value = change.partition("=")
        self._changes[knob] = {"true": True, "false": False}.get(value, value)
        return {"change": change}

    def changes(self) -> dict[str, object]:
        """Returns the knobs whose values differ from those at the start of training."""
        smaller = {"memory.micro_batch": self.micro.size} if len(self.micro.tried) > 1 else {}
        return {**smaller, **self._changes}

    def tried(self) -> str:
        """Returns everything tried, for a message: ``micro-batches of 4 -> 2 -> 1, then memory.features=dynamic``."""
        sizes = " -> ".join(map(str, self.micro.tried))
        return ", then ".join([f"micro-batches of {sizes}", *self._taken])


def one_weight_at_a_time(optimizer: torch.optim.Optimizer) -> bool:
    """Makes the optimizer step one weight at a time; returns whether that changes anything. Slower, but needs no
    temporaries of the size of all weights."""
    has_changed = False
    for group in optimizer.param_groups:
        foreach = group.get("foreach", False)
        if foreach is None:  # torch then decides: all at once on a GPU
            foreach = all(weight.is_cuda for weight in group["params"])
        if foreach and not group.get("fused"):
            group["foreach"] = False
            has_changed = True
    return has_changed
