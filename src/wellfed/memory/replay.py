"""What the CUDA allocator reserves for a run beyond its tensors: recorded passes replayed through a model of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wellfed.memory.caching_allocator import SMALL_SEGMENT, CachingAllocator, OutOfMemory

Events = Sequence[tuple[int, int]]
"""A number for each tensor with its bytes where it is made, with 0 where it is let go; in order."""
STEPS = 3
"""The first makes the optimizer's state among all else, so the second finds other holes; the third is as the second."""
PARTS = 3
"""Micro-batches of a split step that are replayed: those after them find what the ones before have left."""

NEAR_FRAC = 0.005
"""How exactly the least limit is known."""


@dataclass
class Recording:
    """The parts that a run is put together from."""

    resident: list[int] = field(default_factory=list)
    """Bytes of what is there before all: parameters and buffers, in order."""
    filling: Events = ()
    """Of the feature table, which stays."""
    first_step: Events = ()
    """The optimizer's first, whose state stays."""
    step: Events = ()
    """Each other one."""


@dataclass(frozen=True)
class Slack:
    """Bytes that are reserved beyond the tensors at their peak."""

    free: int
    """Where nothing limits them."""
    least: int
    """Where no more are to be had: cached segments went back to the driver while the run settled, and no more do."""


def slack(
    recording: Recording, alone: Events, after: Events | None = None, step: Events | None = None, *, expandable: bool
) -> Slack:
    """What a few steps of a run reserve beyond what they allocate.

    Inputs are left out: they come on a stream of their own.

    Args:
        alone: the pass of a micro-batch, the first of its step.
        after: a later one; None for a step of one.
        step: the optimizer's, where it depends on the passes.
    """
    optimizer = recording.step if step is None else step
    passes = [alone, *([] if after is None else [after] * (PARTS - 1))]

    def settled(limit: int | None) -> CachingAllocator | None:
        """None: it does not fit, or goes on giving segments back."""
        run = _Run(CachingAllocator(limit, expandable=expandable))
        try:
            return run.allocator if run.settles(recording, passes, optimizer) else None
        except OutOfMemory:
            return None

    allocator = settled(None)
    assert allocator is not None, "without a limit nothing goes back"
    peak, high = allocator.peak_asked, allocator.peak_reserved
    low = peak  # less can't do
    while high - low > max(SMALL_SEGMENT, NEAR_FRAC * high):
        middle = (low + high) // 2
        low, high = (low, middle) if settled(middle) is not None else (middle, high)
    return Slack(allocator.peak_reserved - peak, high - peak)


class _Run:
    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._held: dict[int, int] = {}
        """Addresses of what lives until it is let go, or at most until the next step."""

    def settles(self, recording: Recording, passes: Sequence[Events], optimizer: Events) -> bool:
        """Whether the last of some steps needs nothing back from the cache."""
        for size in recording.resident:
            if size:
                self.allocator.allocate(size)
        self.play(recording.filling)
        self.keep()
        before = 0
        for number in range(STEPS):
            before = self.allocator.retries
            self.let_go()
            for each in passes:
                self.play(each)
            if number == 0:
                self.keep_of(recording.first_step)
            else:
                self.play(optimizer)
        return self.allocator.retries == before

    def play(self, events: Events) -> None:
        for number, num_bytes in events:
            if number in self._held:  # let go; or made again by a part that is played once more
                self.allocator.free(self._held.pop(number))
            if num_bytes:
                self._held[number] = self.allocator.allocate(num_bytes)

    def keep(self) -> None:
        """For the whole run."""
        self._held.clear()

    def keep_of(self, events: Events) -> None:
        """Play them; what they leave stays for the whole run."""
        self.play(events)
        for number in {number for number, _ in events}:
            self._held.pop(number, None)

    def let_go(self) -> None:
        """The gradients, when a step begins."""
        for address in self._held.values():
            self.allocator.free(address)
        self._held.clear()


def without(events: Iterable[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """All but those of one tensor."""
    return [event for event in events if event[0] != number]


def resized(events: Iterable[tuple[int, int]], number: int, num_bytes: int) -> list[tuple[int, int]]:
    """One tensor is made with other bytes."""
    return [(each, num_bytes if each == number and size else size) for each, size in events]
