"""Replays recorded steps through a simulated CUDA allocator, to find what it reserves beyond the tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wellfed.plan.predict.caching_allocator import CachingAllocator, OutOfMemory, rounded

Events = Sequence[tuple[int, int]]
"""(tensor id, bytes) events in order; 0 bytes means freed. Tensors with ids below 0 are never freed."""
STEPS = 3
"""Number of replayed steps. The first creates the optimizer's state, so the second finds other gaps; the third repeats
it."""
PARTS = 3
"""Number of replayed micro-batches of a split step; later ones repeat the last."""


@dataclass(frozen=True)
class Trace:
    """Events with bytes that grow linearly with the samples, from two recordings."""

    low: int
    high: int
    """Samples of the larger recording."""
    numbers: tuple[int, ...] = ()
    at_low: tuple[int, ...] = ()
    at_high: tuple[int, ...] = ()

    @classmethod
    def through(cls, recorded: Mapping[int, Events]) -> Trace:
        """Returns the line to the largest recording from the smallest one with the same events.

        If no other recording has these events, the largest one represents all sizes.
        """
        high = max(recorded)
        events = [(number, size > 0) for number, size in recorded[high]]
        same = (low for low in sorted(recorded) if [(number, size > 0) for number, size in recorded[low]] == events)
        low = next(same)
        at_low, at_high = (tuple(size for _, size in recorded[samples]) for samples in (low, high))
        return cls(low, high, tuple(number for number, _ in events), at_low, at_high)

    def at(self, samples: int) -> list[tuple[int, int]]:
        """Returns the events for a number of samples."""
        if self.low == self.high or self.at_low == self.at_high:
            return list(zip(self.numbers, self.at_high, strict=True))
        share = (samples - self.low) / (self.high - self.low)
        return [
            (number, low if low == high else max(1, round(low + share * (high - low))))
            for number, low, high in zip(self.numbers, self.at_low, self.at_high, strict=True)
        ]


@dataclass(frozen=True)
class Recording:
    """Allocations and frees of a run except its inputs, for any micro-batch."""

    resident: tuple[int, ...]
    """Bytes of parameters and buffers, in order of allocation."""
    filling: tuple[tuple[int, int], ...]
    """Events while the feature table is filled."""
    alone: Trace
    """Events of the first micro-batch of a step."""
    after: Trace
    """Events of a later micro-batch."""
    first_step: tuple[tuple[int, int], ...]
    """Events of the optimizer's first step, which creates its state."""
    step: Trace
    """Events of its later steps, by the samples of a step."""
    expandable: bool = False

    @cached_property
    def _known(self) -> dict[tuple[int | None, ...], Replayed]:
        return {}

    def replayed(
        self, micro_batch: int, samples: int, inputs: Sequence[int] = (), limit: int | None = None
    ) -> Replayed:
        """Replays a few steps.

        Args:
            inputs: bytes of a step's inputs copied on the computing stream.
            limit: maximum bytes reserved; None = no limit.
        """
        question = (micro_batch, samples, *inputs, limit)
        if question not in self._known:
            allocator = CachingAllocator(limit, expandable=self.expandable)
            try:
                settles = self._settles(allocator, micro_batch, samples, inputs)
            except OutOfMemory:
                settles = False
            self._known[question] = Replayed(allocator.peak_asked, allocator.peak_reserved, settles)
        return self._known[question]

    def _settles(self, allocator: CachingAllocator, micro_batch: int, samples: int, inputs: Sequence[int]) -> bool:
        """Replays some steps; returns whether the last one returns no cached segment to the driver."""
        held: dict[int, int] = {}
        """Addresses of tensors that live until they are freed, or until the next step."""

        def play(events: Events) -> None:
            for number, num_bytes in events:
                if number in held:  # freed, or created again by a repeated part
                    allocator.free(held.pop(number))
                if num_bytes:
                    address = allocator.allocate(num_bytes)
                    if number >= 0:
                        held[number] = address
                    else:  # in no prediction of tensors
                        allocator.asked -= rounded(num_bytes)

        for size in filter(None, self.resident):
            allocator.allocate(size)
        play(self.filling)
        held.clear()  # the table is kept
        batch: list[int] = []
        before = 0
        for number in range(STEPS):
            before = allocator.retries
            for address in batch:
                allocator.free(address)
            batch = [allocator.allocate(size) for size in filter(None, inputs)]
            for address in held.values():  # gradients of the last step
                allocator.free(address)
            held.clear()
            play(self.alone.at(micro_batch))
            if micro_batch < samples:
                for _ in range(PARTS - 1):
                    play(self.after.at(micro_batch))
            if number == 0:  # recorded with the fewest samples; ``step`` has temporaries of this size
                play(self.first_step)
                for made, _ in self.first_step:
                    held.pop(made, None)
            play(self.step.at(samples))
        return allocator.retries == before

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recording:
        """Returns the recording from the result of ``asdict``.

        Raises:
            TypeError, KeyError: the values are no recording.
        """
        rest = dict(values)
        for name in ("alone", "after", "step"):
            trace = rest[name]
            lists = {key: tuple(trace[key]) for key in ("numbers", "at_low", "at_high")}
            rest[name] = Trace(trace["low"], trace["high"], **lists)
        for name in ("filling", "first_step"):
            rest[name] = tuple((number, size) for number, size in rest[name])
        return cls(**{**rest, "resident": tuple(rest["resident"])})


@dataclass(frozen=True)
class Replayed:
    """Peak bytes, requested and reserved."""

    asked: int
    reserved: int
    settles: bool
    """Whether it fits, and the last step returns no cached segment to the driver, which would block."""


def renumbered(*parts: Events, first: int = 1, kept: Collection[int] = ()) -> list[list[tuple[int, int]]]:
    """Returns the events with tensors numbered in order of creation, without tensors made before all parts.

    Args:
        kept: tensors that are never freed; they get ids below 0.
    """
    known: dict[int, int] = {}
    result = []
    for events in parts:
        found = []
        for number, size in events:
            if size:
                known.setdefault(number, (first + len(known)) * (-1 if number in kept else 1))
            if number in known:
                found.append((known[number], size))
        result.append(found)
    return result


def without(events: Iterable[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """Returns the events without one tensor."""
    return [event for event in events if event[0] != number]


def resized(events: Iterable[tuple[int, int]], number: int, num_bytes: int) -> list[tuple[int, int]]:
    """Returns the events with another size of one tensor."""
    return [(each, num_bytes if each == number and size else size) for each, size in events]
