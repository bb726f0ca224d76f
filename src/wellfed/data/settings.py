"""Settings of a loader, made from plan and configuration. Without torch, so that planning can use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["torch", "inline", "threads", "processes", "own"]
"""``own``: the user's DataLoader, unchanged, which builds its batches itself."""
MOST_PARTS = 16
"""Maximum number of parts that a stream is read in: each has a reader, which may hold samples in memory."""


@dataclass(frozen=True)
class LoaderSettings:
    """The decided values of ``loader.*``; by default the training process builds each batch when asked."""

    backend: BackendName = "inline"
    num_workers: int = 0
    prefetch_factor: int | None = None
    """Batches that each worker builds ahead."""
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout_s: float = 0
    """Seconds to wait for a batch at most; 0 = no limit."""
    worker_threads: int | None = None
    """Threads of torch and numpy in each worker process; None = 1. A worker thread always uses one."""
    skip_ids: tuple[int, ...] = ()
    """Indices of training samples that are never used."""
    max_skipped: int = 0
    """Maximum number of training samples that may fail and are then left out; with one rank only."""
    shuffle_buffer: int | None = None
    """Samples of a stream held in memory, from which the next is drawn."""
