"""Holds the times of the first batches: plain data without torch, for planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHORTEST_STEP_MS = 1.0
"""Milliseconds of the shortest simulated step; real steps are hardly ever shorter."""


@dataclass(frozen=True)
class BackendTime:
    """Time of a training loop with one backend."""

    period_ms: float
    """Mean time of a step, including the wait for its batch."""
    noise_ms: float = 0.0
    """Standard error of ``period_ms``."""


@dataclass(frozen=True)
class FirstBatches:
    """Measurements of the first batches."""

    build_ms: float
    """Median time to build a batch, without the first batch."""
    batch_bytes: int
    """Bytes of one rank's batch."""
    num_batches: int
    """Batches per epoch, the maximum that a loader holds."""
    step_ms: float = SHORTEST_STEP_MS
    """Duration of the simulated step."""
    timed: Mapping[str, BackendTime] = field(default_factory=dict)
    """Times by backend; empty if the time to build a batch was enough to decide."""
    failed: tuple[str, ...] = ()
    uncut: str | None = None
    """Reason why the first batch can't be cut into micro-batches; None = it can."""
