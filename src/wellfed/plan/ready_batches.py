"""Computes whether the batches that workers hold ready fit into host memory and /dev/shm."""

from __future__ import annotations

from dataclasses import dataclass

from wellfed.errors import Fault
from wellfed.units import GIB, show_bytes

NEAR_FRAC = 0.8
"""Share of the free memory to plan with, since other programs need memory too."""


@dataclass(frozen=True)
class Room:
    """Memory for the batches that workers hold ready."""

    prefetch_factor: int
    devices: int
    batch_bytes: int
    num_batches: int
    has_processes: bool
    where: str
    free_bytes: float

    def needed_bytes(self, num_workers: int) -> int:
        """Returns the maximum bytes of batches ready at one time, over all devices."""
        return min(num_workers * self.prefetch_factor, self.num_batches) * self.batch_bytes * self.devices

    def most_workers(self, num_workers: int) -> int:
        """Returns the maximum number of workers that leave memory for other programs; 0 if even one is too many."""
        counts = range(num_workers, 0, -1)
        return next((count for count in counts if self.needed_bytes(count) <= NEAR_FRAC * self.free_bytes), 0)

    def fault(self, num_workers: int) -> Fault | None:
        """Returns the fault of workers whose batches don't fit."""
        needed = self.needed_bytes(num_workers)
        if needed <= self.free_bytes:
            return None
        workers = "worker processes" if self.has_processes else "threads"
        factors = [f"{num_workers} {workers}", f"{self.prefetch_factor} batches each"]
        if num_workers * self.prefetch_factor > self.num_batches:
            factors = [f"{self.num_batches} batches (a whole epoch)"]
        factors.append(show_bytes(self.batch_bytes))
        if self.devices > 1:
            factors.append(f"{self.devices} devices")
        free = f"{self.where} has {show_bytes(self.free_bytes)} free"
        problem = f"the batches kept ready don't fit: {' x '.join(factors)} = {show_bytes(needed)}, and {free}."
        most = self.most_workers(num_workers)
        way_out = f"Set loader.num_workers={most}" if most else "Set loader=baseline"
        if self.where == "/dev/shm":
            way_out += f", or start a container with --shm-size={max(1, -(-2 * needed // GIB))}g"
        return Fault(f"loader.num_workers={num_workers}", problem, f"{way_out}.")
