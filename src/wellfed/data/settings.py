"""Says how a loader builds its batches: one frozen object, made from plan and configuration, and passed whole.

Knows no torch, so that planning may make one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["torch", "inline", "threads", "processes", "own"]
"""``own``: a DataLoader of the user's, left as it came, which builds by itself."""
MOST_PARTS = 16
"""A stream that can be read in more parts is read in so many: each has a reader, and may hold samples ready."""


@dataclass(frozen=True)
class LoaderSettings:
    """The knobs ``loader.*`` as they were decided; by default the training process builds each batch when asked."""

    backend: BackendName = "inline"
    num_workers: int = 0
    prefetch_factor: int | None = None
    """Batches that each worker builds ahead."""
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout_s: float = 0
    """Longest wait for a batch; 0 = for ever."""
    worker_threads: int | None = None
    """Threads of torch and numpy in each worker process; None = 1. A worker thread always has itself alone."""
    skip_ids: tuple[int, ...] = ()
    """Training samples that belong to no step."""
    max_skipped: int = 0
    """Training samples that may fail, and are left out from then on; with one rank only."""
    shuffle_buffer: int | None = None
    """Samples of a stream that are held for one of them to be drawn."""
    finds_stuck_sample: bool = True
    """Whether the sample that a worker hangs at is looked for, which takes several timeouts."""
