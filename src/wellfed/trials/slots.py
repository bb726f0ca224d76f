"""Gives trials their places: a GPU each, or the whole of a machine without one, with a share of the processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What one trial is given."""

    gpus: tuple[int, ...]
    """Indices into the sweep's own list; empty for a trial on the processor."""
    environment: Mapping[str, str]
    cpus: frozenset[int] | None
    """None = all."""


class Slots:
    """Which GPUs are free. Trials on the processor run alone, so that none disturbs another's figures.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them: indices or UUIDs; empty on a machine without.
        cpus: that this process may run on; shared out evenly, so that loaders of neighbours don't take each other's.
    """

    def __init__(self, gpus: Sequence[str], cpus: frozenset[int] | None) -> None:
        self._gpus, self._cpus = tuple(gpus), cpus
        self._free = list(range(len(self._gpus)))
        self._is_alone = False
        self._busy = 0

    def take(self, num_gpus: int) -> Place | None:
        """A place for a trial on so many GPUs; 0 = on the processor. None = not now."""
        if self._is_alone or len(self._free) < num_gpus or (num_gpus == 0 and self._busy > 0):
            return None
        self._busy += 1
        if num_gpus == 0:
            self._is_alone = True
            return Place((), {}, None)
        taken, self._free = tuple(self._free[:num_gpus]), self._free[num_gpus:]
        named = ",".join(self._gpus[index] for index in taken)
        return Place(taken, {"CUDA_VISIBLE_DEVICES": named}, self._share(taken))

    def give_back(self, place: Place) -> None:
        """Its trial has ended."""
        self._busy -= 1
        self._free = sorted([*self._free, *place.gpus])
        self._is_alone = False

    def _share(self, taken: Sequence[int]) -> frozenset[int] | None:
        if self._cpus is None or len(self._gpus) < 2 or len(self._cpus) < len(self._gpus):
            return None
        ordered, number = sorted(self._cpus), len(self._gpus)
        edges = [round(index * len(ordered) / number) for index in range(number + 1)]
        return frozenset(cpu for index in taken for cpu in ordered[edges[index] : edges[index + 1]])


def visible(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """How to name each visible GPU to a child, in CUDA's order.

    Args:
        num_gpus: that CUDA shows in this environment.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return entries[:num_gpus] if len(entries) >= num_gpus else [str(index) for index in range(num_gpus)]
