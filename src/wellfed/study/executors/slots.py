"""Divides the GPUs and CPUs of this machine among trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """GPUs and CPUs of one trial."""

    gpus: tuple[int, ...]
    """Indices into the list of GPUs; empty for a trial on the processor."""
    environment: Mapping[str, str]
    cpus: frozenset[int] | None
    """CPUs that the trial may run on; None = all."""


class Slots:
    """GPUs of this machine and which of them are free.

    A trial on the processor runs alone, since it would disturb the figures of others.

    Args:
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them, by index or UUID; empty on a machine without.
        cpus: CPUs that this process may run on. Each GPU has an even share, so that loaders don't compete for CPUs.
    """

    def __init__(self, gpus: Sequence[str], cpus: frozenset[int] | None) -> None:
        self._gpus, self._cpus = tuple(gpus), cpus
        self._free = list(range(len(self._gpus)))
        self._is_alone = False
        self._busy = 0

    def take(self, num_gpus: int) -> Slot | None:
        """Returns a slot for a trial on ``num_gpus`` GPUs (0 = on the processor), or None if there is none now."""
        if not self.has_room(num_gpus):
            return None
        self._busy += 1
        if num_gpus == 0:
            self._is_alone = True
            return Slot((), {}, None)
        taken = tuple(self._free[:num_gpus])
        self._free = [gpu for gpu in self._free if gpu not in taken]
        named = ",".join(self._gpus[index] for index in taken)
        return Slot(taken, {"CUDA_VISIBLE_DEVICES": named}, self._share(taken))

    def has_room(self, num_gpus: int) -> bool:
        """Returns whether `take` would return a slot."""
        return not self._is_alone and len(self._free) >= num_gpus and not (num_gpus == 0 and self._busy > 0)

    def give_back(self, slot: Slot) -> None:
        """Frees a slot."""
        self._busy -= 1
        self._free = sorted([*self._free, *slot.gpus])
        self._is_alone = False

    def _share(self, taken: Sequence[int]) -> frozenset[int] | None:
        if self._cpus is None or len(self._gpus) < 2 or len(self._cpus) < len(self._gpus):
            return None
        ordered, number = sorted(self._cpus), len(self._gpus)
        edges = [round(index * len(ordered) / number) for index in range(number + 1)]
        return frozenset(cpu for index in taken for cpu in ordered[edges[index] : edges[index + 1]])


def visible(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """Returns a name for each of the ``num_gpus`` that CUDA shows in this environment, in CUDA's order.

    A child process sees the same GPUs by these names in CUDA_VISIBLE_DEVICES.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return entries[:num_gpus] if len(entries) >= num_gpus else [str(index) for index in range(num_gpus)]
