"""Finds every GPU of this machine for the monitor: cards, and the instances of split cards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from wellfed.errors import ConfigError
from wellfed.observe.hardware.detect import ask_nvml
from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.nvml.session import NvmlSession


@dataclass(frozen=True)
class FoundGpus:
    """GPUs found on this machine."""

    gpus: tuple[GpuFacts, ...]
    """Numbered as in nvidia-smi. MIG instances continue the numbers after the last card."""
    problem: str | None = None
    """Reason if there are none."""
    notes: tuple[str, ...] = ()
    """Figures that could not be read, one sentence each."""

    def only(self, wanted: Collection[int]) -> FoundGpus:
        """Returns only the GPUs of these numbers.

        Raises:
            ConfigError: no GPU has one of these numbers.
        """
        found = {gpu.index for gpu in self.gpus}
        if absent := sorted(set(wanted) - found):
            there = f"there are {', '.join(map(str, sorted(found)))}" if found else f"there is none ({self.problem})"
            raise ConfigError.of(
                f"--gpus {','.join(map(str, wanted))}",
                f"no GPU has the number {absent[0]}: {there}.",
                "nvidia-smi lists them. Leave --gpus out to watch all.",
            )
        return replace(self, gpus=tuple(gpu for gpu in self.gpus if gpu.index in wanted))


def find_gpus() -> FoundGpus:
    """Returns all GPUs in NVML's order, with the processes on them."""
    cards, error = ask_nvml(NvmlSession())
    instances = [gpu for gpu in cards.devices if gpu.is_mig]
    first = 1 + max((gpu.index for gpu in cards.devices), default=-1)
    gpus = [replace(gpu, index=first + instances.index(gpu)) if gpu.is_mig else gpu for gpu in cards.devices]
    problem = None
    if error is not None:
        problem = error.reason
    elif not gpus:
        problem = "; ".join(note.rstrip(".") for note in cards.notes) or "no card found"
    return FoundGpus(tuple(gpus), problem, cards.notes if gpus else ())
