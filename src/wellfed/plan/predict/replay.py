"""Replays recorded steps through a simulated CUDA allocator: what it reserves for a run beyond its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wellfed.plan.predict.caching_allocator import CachingAllocator, OutOfMemory

Events = Sequence[tuple[int, int]]
"""A number for each tensor with its bytes where it is made, with 0 where it is let go; in order."""
STEPS = 3
"""The first makes the optimizer's state among all else, so the second finds other holes; the third is as the second."""
PARTS = 3
"""Micro-batches of a split step that are replayed: those after them find what the ones before have left."""


@dataclass(frozen=True)
class Trace:
    """Events whose bytes grow in a line with the samples, from two recordings of them."""

    low: int
    high: int
    """Samples of each."""
    numbers: tuple[int, ...] = ()
    at_low: tuple[int, ...] = ()
    at_high: tuple[int, ...] = ()

    @classmethod
    def through(cls, recorded: Mapping[int, Events]) -> Trace:
        """The line from the fewest samples that have the events of the most; a single sample may take other ways.

        Where no others have them, those of the most stand for all.
        """
        high = max(recorded)
        events = [(number, size > 0) for number, size in recorded[high]]
        same = (low for low in sorted(recorded) if [(number, size > 0) for number, size in recorded[low]] == events)
        low = next(same)
        at_low, at_high = (tuple(size for _, size in recorded[samples]) for samples in (low, high))
        return cls(low, high, tuple(number for number, _ in events), at_low, at_high)

    def at(self, samples: int) -> list[tuple[int, int]]:
        """The events of so many samples."""
        if self.low == self.high or self.at_low == self.at_high:
            return list(zip(self.numbers, self.at_high, strict=True))
        share = (samples - self.low) / (self.high - self.low)
        return [
            (number, low if low == high else max(1, round(low + share * (high - low))))
            for number, low, high in zip(self.numbers, self.at_low, self.at_high, strict=True)
        ]


@dataclass(frozen=True)
class Recording:
    """What a run allocates and frees beside its inputs, for any micro-batch."""

    resident: tuple[int, ...]
    """Bytes of what is there before all: parameters and buffers, in order."""
    filling: tuple[tuple[int, int], ...]
    """Of the feature table, which stays."""
    alone: Trace
    """The pass of a micro-batch that is the first of its step."""
    after: Trace
    """Of a later one."""
    first_step: tuple[tuple[int, int], ...]
    """The optimizer's first, whose state stays."""
    step: Trace
    """Its other ones, by the samples of a step."""
    expandable: bool = False

    @cached_property
    def _known(self) -> dict[tuple[int | None, ...], Replayed]:
        return {}

    def replayed(
        self, micro_batch: int, samples: int, inputs: Sequence[int] = (), limit: int | None = None
    ) -> Replayed:
        """A few steps.

        Args:
            inputs: bytes of a step's, where they come on the stream that computes.
            limit: bytes that may be reserved.
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
        """Whether the last of some steps needs nothing back from the cache."""
        held: dict[int, int] = {}
        """Addresses of what lives until it is let go, or at most until the next step."""

        def play(events: Events) -> None:
            for number, num_bytes in events:
                if number in held:  # let go; or made again by a part that is played once more
                    allocator.free(held.pop(number))
                if num_bytes:
                    held[number] = allocator.allocate(num_bytes)

        for size in filter(None, self.resident):
            allocator.allocate(size)
        play(self.filling)
        held.clear()  # what is left of it stays
        batch: list[int] = []
        before = 0
        for number in range(STEPS):
            before = allocator.retries
            for address in batch:
                allocator.free(address)
            batch = [allocator.allocate(size) for size in filter(None, inputs)]
            for address in held.values():  # gradients of the last step, which were there until now
                allocator.free(address)
            held.clear()
            play(self.alone.at(micro_batch))
            if micro_batch < samples:
                for _ in range(PARTS - 1):
                    play(self.after.at(micro_batch))
            if number == 0:  # recorded with the fewest samples: its temporaries for these come by the other one
                play(self.first_step)
                for made, _ in self.first_step:
                    held.pop(made, None)
            play(self.step.at(samples))
        return allocator.retries == before

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recording:
        """The recording that ``asdict`` described.

        Raises:
            TypeError, KeyError: it describes none.
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
    """Bytes at the highest moment of each kind."""

    asked: int
    reserved: int
    settles: bool
    """Whether it fits, and the last step needs nothing back from the cache: at a limit cached segments go back to the
    driver, which is waited for."""


def renumbered(*parts: Events, first: int = 1) -> list[list[tuple[int, int]]]:
    """Tensors numbered by the order in which they are made; what was made before all parts is left out."""
    known: dict[int, int] = {}
    result = []
    for events in parts:
        kept = []
        for number, size in events:
            if size:
                known.setdefault(number, first + len(known))
            if number in known:
                kept.append((known[number], size))
        result.append(kept)
    return result


def without(events: Iterable[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """All but those of one tensor."""
    return [event for event in events if event[0] != number]


def resized(events: Iterable[tuple[int, int]], number: int, num_bytes: int) -> list[tuple[int, int]]:
    """One tensor is made with other bytes."""
    return [(each, num_bytes if each == number and size else size) for each, size in events]
