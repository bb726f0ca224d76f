"""Steps a run down to less memory: smaller micro-batches, then slower ways of training, each change for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wellfed.train.memory import oom
from wellfed.train.memory.remembered import MICRO_BATCH


class MicroBatches:
    """How the samples of one optimizer step are split, and what comes after an out-of-memory error.

    State: a size that only goes down. ``step_down`` moves to the next of ``steps`` below the size, or to half of it;
    at 1 there is no way down.
    """

    def __init__(self, size: int, steps: Sequence[int] | None = None) -> None:
        self.size = size
        self.tried = [size]
        self._steps = None if steps is None else sorted((step for step in steps if step < size), reverse=True)

    def sizes(self, num_samples: int, num_parts: int | None = None) -> list[int]:
        """Micro-batch sizes that add up to ``num_samples``; the last is what is left.

        Args:
            num_parts: so many, nearly equal, of which the last may be 0: ranks that must do equally many.
        """
        if num_parts is not None:
            return [
                end - start for start, end in pairwise(num_samples * part // num_parts for part in range(num_parts + 1))
            ]
        full, rest = divmod(num_samples, self.size)
        return [self.size] * full + ([rest] if rest else [])

    @property
    def may_step_down(self) -> bool:
        """Whether there is a smaller size."""
        return bool(self._steps) or (self._steps is None and self.size > 1)

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

    def go_on_with(self, size: int) -> bool:
        """Step down to a size that an earlier part of the run went on with; whether that is smaller."""
        if size >= self.size:
            return False
        self._steps = None if self._steps is None else [step for step in self._steps if step < size]
        self.size = size
        self.tried.append(size)
        return True


@dataclass(frozen=True)
class Rung:
    """Another way of training that needs less memory and learns the same."""

    change: str
    """As it would be typed: ``memory.features=dynamic``."""
    take: Callable[[], bool]
    """Change to it; False where there is nothing to change. It may run out of memory itself, and is left out then."""
    frees_held: bool = False
    """It frees what lies in memory between the passes, too, and not only what they need themselves."""


class Ladder:
    """The way down: smaller micro-batches, and where there are none left the rungs, in order, each once."""

    def __init__(self, micro: MicroBatches, rungs: Sequence[Rung] = ()) -> None:
        self.micro, self._rungs = micro, list(rungs)
        self._taken: list[str] = []
        self._changes: dict[str, object] = {}

    def step_down(self, *, of_held: bool = False) -> dict[str, object] | None:
        """Take the next step; what has changed, or None if nothing was left to change.

        Args:
            of_held: memory ran out where no pass was under way, so that neither smaller micro-batches nor activations
                that are computed again would help: only a rung that frees what lies there all the time.
        """
        before = self.micro.size
        if not of_held and (smaller := self.micro.step_down()) is not None:
            return {"micro_batch": smaller, "before": before}
        for rung in [rung for rung in self._rungs if rung.frees_held or not of_held]:
            self._rungs.remove(rung)
            has_changed, failure = oom.Attempts()(rung.take)
            if failure is not None:
                oom.release()
                self._taken.append(f"{rung.change} (for which memory did not suffice itself)")
            elif has_changed:
                self.note(rung.change)
                return {"change": rung.change}
        return None

    def note(self, change: str) -> None:
        """Something was changed to need less memory; ``change`` as for `Rung`."""
        self._taken.append(change)
        knob, _, value = change.partition("=")
        self._changes[knob] = {"true": True, "false": False}.get(value, value)

    def changes(self) -> dict[str, object]:
        """The knobs that have another value by now than training began with."""
        smaller = {MICRO_BATCH: self.micro.size} if len(self.micro.tried) > 1 else {}
        return {**smaller, **self._changes}

    def tried(self) -> str:
        """All ways so far, for a message: ``micro-batches of 4 -> 2 -> 1, then memory.features=dynamic``."""
        sizes = " -> ".join(map(str, self.micro.tried))
        return ", then ".join([f"micro-batches of {sizes}", *self._taken])
