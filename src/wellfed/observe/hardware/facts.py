"""Describes a machine by plain values that go into run.json and come back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wellfed.observe.nvml.devices import Holder

SIMULATED = "Simulated "
"""How the name of a card begins that is no real GPU."""


@dataclass(frozen=True)
class GpuFacts:
    """One card or MIG instance; None marks unknown facts."""

    index: int
    """CUDA-visible number: torch's ``cuda:<index>``."""
    uuid: str | None
    """UUID as NVML writes it, ``GPU-...`` or ``MIG-...``."""
    name: str
    memory_gib: float | None
    """Memory for programs: torch's total if torch sees the card, else NVML's total less the driver's reserve."""
    capability: str | None
    """CUDA compute capability, e.g. "9.0"."""
    free_gib: float | None = None
    """Not held by any process when asked, at most ``memory_gib``."""
    nvml_index: int | None = None
    """None where NVML does not know the card: no utilisation, power or temperature."""
    is_mig: bool = False
    is_simulated: bool = False
    """No real GPU (tests/fake_cuda): every figure of it is for learning and demonstration."""
    holders: tuple[Holder, ...] = ()
    """Other processes with memory here, the largest first; empty where the driver does not tell."""

    @property
    def others_gib(self) -> float:
        """Returns the memory held by other processes when asked; 0 if unknown."""
        if self.memory_gib is None or self.free_gib is None:
            return 0.0
        return max(0.0, self.memory_gib - self.free_gib)

    def held_by(self, most: int = 3) -> str:
        """Returns the processes that hold the most, for messages, also if the driver names none."""
        if not self.holders:
            return "processes that the driver does not name"
        rest = len(self.holders) - most
        return ", ".join(holder.describe() for holder in self.holders[:most]) + (f", {rest} more" if rest > 0 else "")

    def describe(self) -> str:
        """Returns name and size for messages, e.g. ``NVIDIA H200 (139.8 GiB)``."""
        return self.name if self.memory_gib is None else f"{self.name} ({self.memory_gib:.1f} GiB)"


@dataclass(frozen=True)
class MachineFacts:
    """One machine at one moment."""

    cpu: str
    cpu_quota_cores: float
    """Cores this process may use: the least of affinity and every cgroup limit above it. May be a fraction."""
    ram_gib: float
    """The host's memory, or the smallest limit on it: of a cgroup, RLIMIT_AS or RLIMIT_DATA."""
    ram_available_gib: float
    shm_gib: float | None = None
    """Size of /dev/shm; None where the system has none."""
    shm_free_gib: float | None = None
    gpus: tuple[GpuFacts, ...] = ()
    """In CUDA's order. NVML's view where torch was not asked or can't use them."""
    nvml_problem: str | None = None
    """Why NVML shows no card, short: "driver not loaded"; None when it does."""
    nvml_failed: bool = False
    """NVML is installed here and did not work; without NVIDIA's driver a machine is normal, and this is false."""
    cards_left_out: tuple[str, ...] = ()
    """A sentence for each card or MIG instance that NVML counts and could not read."""
    torch_problem: str | None = None
    """Why torch can't use a GPU; None when it can, or was not asked."""
    warnings: tuple[str, ...] = ()
    """Warnings to be shown once: what could not be read, or is uncertain."""
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    os: str = ""

    @property
    def training_gpus(self) -> tuple[GpuFacts, ...]:
        """Returns the cards that training can run on: none if torch can't use them, whatever NVML shows."""
        return () if self.torch_problem is not None else self.gpus

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, recorded: Mapping[str, Any]) -> MachineFacts:
        """Returns the facts that :meth:`to_dict` wrote.

        Raises:
            TypeError: a field is missing, or is not one of this version.
        """
        lists = {name: tuple(recorded.get(name, ())) for name in ("warnings", "cards_left_out")}
        gpus = (
            GpuFacts(**{**gpu, "holders": tuple(Holder(**holder) for holder in gpu.get("holders", ()))})
            for gpu in recorded.get("gpus", ())
        )
        return cls(**{**recorded, **lists, "gpus": tuple(gpus)})
