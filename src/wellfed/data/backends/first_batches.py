"""Holds what timing the first batches has shown: plain data, without torch, which planning reads too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHORTEST_STEP_MS = 1.0
"""Steps of a training loop are hardly ever shorter."""


@dataclass(frozen=True)
class BackendTime:
    """What a training loop takes with one backend."""

    period_ms: float
    """Mean time of a step and of the wait for its batch."""
    noise_ms: float = 0.0
    """Standard error of ``period_ms``."""


@dataclass(frozen=True)
class FirstBatches:
    """What building the first batches has shown."""

    build_ms: float
    """Median time to build one batch, warm; the first batch is dropped."""
    batch_bytes: int
    """Tensors of one batch of one rank."""
    num_batches: int
    """Batches of an epoch: more are never held."""
    step_ms: float = SHORTEST_STEP_MS
    """Length of the simulated step."""
    timed: Mapping[str, BackendTime] = field(default_factory=dict)
    """By backend; empty where one batch said enough."""
    failed: tuple[str, ...] = ()
    """Backends that raised."""
    uncut: str | None = None
    """Why the first batch can't be cut into micro-batches; None: it can."""
