"""Holds the settings of a loader, made from plan and configuration. No torch, so that planning can use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["torch", "inline", "threads", "processes", "own"]
"""Names of backends; ``own`` is the user's loader as it came, which builds its batches itself."""


@dataclass(frozen=True)
class LoaderSettings:
    """Decided values of ``loader.*``; by default the training process builds each batch on request."""

    backend: BackendName = "inline"
    num_workers: int = 0
    prefetch_factor: int | None = None
    """Batches that each worker builds ahead."""
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout_s: float = 0
    """Maximum seconds to wait for a batch; 0 = no limit."""
    skip_ids: tuple[int, ...] = ()
    """Indices of training samples to skip."""
    max_skipped: int = 0
    """Maximum number of failing training samples to leave out; with one rank only."""
