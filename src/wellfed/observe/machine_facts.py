"""Defines the facts of a machine as plain values, stored in run.json and loaded from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from wellfed.record.entries import MachineEntry
from wellfed.units import show_line

SIMULATED = "Simulated "
"""Prefix of the name of a card that is not real."""


@dataclass(frozen=True)
class Holder:
    """A process that held memory of a device when queried."""

    pid: int
    """Process id on the host. Inside a container another process may have that id."""
    name: str | None
    """None if neither driver nor system reports it, as for a process of another container."""
    memory_gib: float | None
    """None if the driver does not report it (Windows' WDDM, some MIG instances)."""

    def describe(self) -> str:
        """Returns a text such as ``python (pid 4711, 20,480 MiB)``."""
        size = "size unknown" if self.memory_gib is None else f"{self.memory_gib * 1024:,.0f} MiB"
        return f"{self.name or 'a process'} (pid {self.pid}, {size})"


@dataclass(frozen=True)
class GpuFacts:
    """One card or MIG instance. None = unknown."""

    index: int
    """CUDA-visible number: torch's ``cuda:<index>``."""
    uuid: str | None
    """UUID as NVML writes it, ``GPU-...`` or ``MIG-...``."""
    name: str
    memory_gib: float | None
    """Memory for programs. torch's total if torch sees the card, else NVML's total minus the driver's reserve."""
    capability: str | None
    """CUDA compute capability, e.g. "9.0"."""
    free_gib: float | None = None
    """Memory that no process held when queried, at most ``memory_gib``."""
    nvml_index: int | None = None
    """None where NVML does not list the card: no utilisation, power or temperature."""
    is_mig: bool = False
    """An instance of a split card."""
    has_mig_mode: bool = False
    """A physical card in MIG mode. CUDA shows its instances instead."""
    power_limit_w: float | None = None
    """Power limit of the board when queried."""
    is_simulated: bool = False
    """Not a real GPU (tests/fake_cuda). All its figures are for demonstration."""
    holders: tuple[Holder, ...] = ()
    """Other processes with memory here, largest first. Empty where the driver lists none."""

    @property
    def others_gib(self) -> float:
        """Memory held by other processes when queried; 0 if unknown."""
        if self.memory_gib is None or self.free_gib is None:
            return 0.0
        return max(0.0, self.memory_gib - self.free_gib)

    @property
    def title(self) -> str:
        """Number and name, with the number of the card of an instance: ``GPU 0 NVIDIA H200``."""
        of = f" of GPU {self.nvml_index}" if self.is_mig else ""
        return f"GPU {self.index} {show_line(self.name)}{of}"

    @property
    def has_utilisation(self) -> bool:
        """Whether NVML gives utilisation: only for cards that are not split."""
        return not (self.is_mig or self.has_mig_mode)

    def held_by(self, most: int = 3) -> str:
        """Returns the processes that hold the most, as text for messages."""
        shown = [holder.describe() for holder in self.holders[:most]]
        more = [f"{len(self.holders) - most} more"] if len(self.holders) > most else []
        return ", ".join([*shown, *more]) or "processes that the driver does not name"

    def describe(self) -> str:
        """Returns name and size for messages, e.g. ``NVIDIA H200 (139.8 GiB)``."""
        return self.name if self.memory_gib is None else f"{self.name} ({self.memory_gib:.1f} GiB)"


@dataclass(frozen=True)
class MachineFacts:
    """One machine at one moment."""

    cpu: str
    cpu_quota_cores: float
    """Cores this process may use: the minimum of affinity and every cgroup limit above it. May be a fraction."""
    ram_gib: float
    """The host's memory, or the smallest limit on it (cgroup)."""
    ram_available_gib: float
    shm_gib: float | None = None
    """Size of /dev/shm; None where the system has none."""
    shm_free_gib: float | None = None
    gpus: tuple[GpuFacts, ...] = ()
    """Cards in CUDA's order. NVML's view if torch was not queried or can't use them."""
    nvml_problem: str | None = None
    """Short reason why NVML shows no card, e.g. "driver not loaded"; None if it shows some."""
    nvml_failed: bool = False
    """NVML is installed and failed. False on a machine without NVIDIA's driver."""
    cards_left_out: tuple[str, ...] = ()
    """One sentence for each card or MIG instance that NVML counts but can't read."""
    torch_problem: str | None = None
    """Reason why torch can't use a GPU; None if it can, or was not queried."""
    warnings: tuple[str, ...] = ()
    """Warnings to show once, about values that are unreadable or uncertain."""
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    os: str = ""

    @property
    def training_gpus(self) -> tuple[GpuFacts, ...]:
        """Cards that training can use: none if torch can't use them, whatever NVML shows."""
        return () if self.torch_problem is not None else self.gpus

    def entry(self) -> MachineEntry:
        """Returns ``machine`` of a run's record."""
        return {
            "cpu": self.cpu,
            "cpu_quota_cores": self.cpu_quota_cores,
            "host_cores": os.cpu_count() or 1,
            "ram_gib": self.ram_gib,
            "shm_gib": self.shm_gib,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "versions": dict(self.versions),
            "os": self.os,
            "nvml_problem": self.nvml_problem,
            "torch_problem": self.torch_problem,
        }
