"""Computes whether the batches that workers hold ready fit into host memory and /dev/shm."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wellfed.units import GIB, show_bytes

NEAR_FRAC = 0.8
"""Share of the free memory to plan with, since other programs need memory too."""


@dataclass(frozen=True)
class ReadyBatches:
    """Batches that workers hold ready, and the memory for them."""

    num_workers: int
    prefetch_factor: int
    devices: int
    batch_bytes: int
    num_batches: int
    has_processes: bool
    where: str
    free_bytes: float

    @property
    def needed_bytes(self) -> int:
        """Maximum bytes of batches ready at one time, over all devices."""
        return min(self.num_workers * self.prefetch_factor, self.num_batches) * self.batch_bytes * self.devices

    @property
    def is_full(self) -> bool:
        """Whether the batches don't fit."""
        return self.needed_bytes > self.free_bytes

    @property
    def most_workers(self) -> int:
        """Maximum number of workers that leave memory for other programs; 0 if even one is too many."""
        limit_bytes = NEAR_FRAC * self.free_bytes
        fewer = (replace(self, num_workers=count) for count in range(self.num_workers, 0, -1))
        return next((each.num_workers for each in fewer if each.needed_bytes <= limit_bytes), 0)

    def describe(self) -> str:
        """Returns needed and free bytes for a message."""
        workers = "worker processes" if self.has_processes else "threads"
        factors = [f"{self.num_workers} {workers}", f"{self.prefetch_factor} batches each"]
        if self.num_workers * self.prefetch_factor > self.num_batches:
            factors = [f"{self.num_batches} batches (a whole epoch)"]
        factors.append(show_bytes(self.batch_bytes))
        if self.devices > 1:
            factors.append(f"{self.devices} devices")
        needed, free = show_bytes(self.needed_bytes), show_bytes(self.free_bytes)
        return f"{' x '.join(factors)} = {needed}, and {self.where} has {free} free"

    @property
    def way_out(self) -> str:
        """An override that needs less, and how to get more of /dev/shm."""
        fewer = f"loader.num_workers={self.most_workers}" if self.most_workers else "loader=baseline"
        if self.where != "/dev/shm":
            return f"Set {fewer}."
        return f"Set {fewer}, or start a container with --shm-size={max(1, -(-2 * self.needed_bytes // GIB))}g."
