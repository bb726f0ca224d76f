"""Finds every GPU of this machine for the monitor: cards, and the instances of split cards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from wellfed.errors import ConfigError
from wellfed.observe.hardware.detect import ask_nvml
from wellfed.observe.hardware.facts import SIMULATED
from wellfed.observe.nvml.devices import Device
from wellfed.observe.nvml.session import NvmlSession
from wellfed.units import gib, show_line


@dataclass(frozen=True)
class SeenGpu:
    """A GPU of this machine, visible to CUDA or not."""

    index: int
    """Number of the card in nvidia-smi. MIG instances continue the numbers after the last card."""
    device: Device

    @property
    def title(self) -> str:
        """Number and name: ``GPU 0 NVIDIA H200``."""
        of = f" of GPU {self.device.nvml_index}" if self.device.is_mig else ""
        return f"GPU {self.index} {show_line(self.device.name)}{of}"

    @property
    def memory_gib(self) -> float | None:
        """Memory for programs; None if unknown."""
        return None if self.device.memory_total_bytes is None else gib(self.device.memory_total_bytes)

    @property
    def has_utilisation(self) -> bool:
        """Whether NVML gives utilisation: only for cards that are not split."""
        return not (self.device.is_mig or self.device.has_mig_mode)

    @property
    def is_simulated(self) -> bool:
        """Whether its figures are only for demonstration."""
        return self.device.name.startswith(SIMULATED)


@dataclass(frozen=True)
class FoundGpus:
    """GPUs found on this machine."""

    gpus: tuple[SeenGpu, ...]
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
    number_of_instance = 1 + max((device.nvml_index for device in cards.devices), default=-1)
    gpus = []
    for device in cards.devices:
        gpus.append(SeenGpu(number_of_instance if device.is_mig else device.nvml_index, device))
        number_of_instance += device.is_mig
    problem = None
    if error is not None:
        problem = error.reason
    elif not gpus:
        problem = "; ".join(note.rstrip(".") for note in cards.notes) or "no card found"
    return FoundGpus(tuple(gpus), problem, cards.notes if gpus else ())
