"""Results of timing the first batches: plain data without torch, which planning reads too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHORTEST_STEP_MS = 1.0
"""Shortest simulated step; steps of a training loop are hardly ever shorter."""


@dataclass(frozen=True)
class BackendTime:
    """Time of a training loop with one backend."""

    period_ms: float
    """Mean time of a step and of the wait for its batch."""
    noise_ms: float = 0.0
    """Standard error of ``period_ms``."""


@dataclass(frozen=True)
class FirstBatches:
    """Measurements of the first batches."""

    build_ms: float
    """Median time to build one batch; the first batch is dropped."""
    batch_bytes: int
    """Tensors of one batch of one rank."""
    num_batches: int
    """Batches of an epoch; a loader never holds more."""
    step_ms: float = SHORTEST_STEP_MS
    """Length of the simulated step."""
    timed: Mapping[str, BackendTime] = field(default_factory=dict)
    """Times by backend; empty if building one batch was enough to decide."""
    failed: tuple[str, ...] = ()
    """Backends that raised."""
    uncut: str | None = None
    """Reason why the first batch can't be cut into micro-batches; None: it can."""
