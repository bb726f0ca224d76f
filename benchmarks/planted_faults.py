"""Lists the faults that `benchmarks/diagnosis.py` plants in real runs, and the runs that have none.

Overrides are those of `src/train.py`; those under ``workload`` and ``callbacks`` are what a user's own code does, see
`benchmarks/planted_workload.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Where = Literal["cpu", "simulated"]


@dataclass(frozen=True)
class Shape:
    """A workload: what its batches and steps are like."""

    name: str
    yaml: str
    """Its option of the group ``workload``."""
    step_ms: float
    batch: int


def _shape(name: str, model: str, sizes: list[int], batch: int, step_ms: float) -> Shape:
    """On a CPU the model rests for most of a step, see planted_workload.py."""
    yaml = f"""
name: {name}
sample_unit: samples
effective_batch_size: {batch}
model: {{_target_: planted_workload.{model}, rest_ms: {step_ms}}}
data:
  _target_: planted_workload.data
  sizes: {sizes}
  batch: {batch}
  step_ms: {step_ms}
optimizer: {{_target_: torch.optim.AdamW, lr: 0.001}}
"""
    return Shape(name, yaml, step_ms, batch)


SHAPES = (
    _shape("table", "Table", [32], 32, 12.0),
    _shape("pictures", "Pictures", [3, 48, 48], 16, 24.0),
    _shape("sequences", "Sequences", [32, 8], 32, 36.0),
)


@dataclass(frozen=True)
class Fault:
    """A cause of lost time, and how it comes about."""

    kind: str
    """Tells it from others with the same cause."""
    cause: str
    """The id of the finding that must come first."""
    where: Where
    code: tuple[str, ...] = ()
    """What is so with the fault and without it."""
    fault: tuple[str, ...] = ()
    """Plants it."""
    cure: tuple[str, ...] | None = None
    """Instead of ``fault``, where knobs can remove it: chosen by hand, what the finding's own are compared with."""
    steps: int = 80
    card: Mapping[str, Any] = field(default_factory=dict)
    """Of the simulated machine: fields of `tests.fake_cuda.machine.Cards`."""
    burners: int = 0
    """Processes beside the run that take a core each until its steps are over."""
    also: tuple[str, ...] = ()
    """Other ids that say the same of it."""


@dataclass(frozen=True)
class Healthy:
    """A run that loses nothing."""

    kind: str
    where: Where
    code: tuple[str, ...] = ()
    steps: int = 80
    card: Mapping[str, Any] = field(default_factory=dict)


def _data(**values: Any) -> tuple[str, ...]:
    return tuple(f"+workload.data.{name}={value}" for name, value in values.items())


def _workers(number: int, *more: str) -> tuple[str, ...]:
    return ("loader.backend=processes", f"loader.num_workers={number}", *more)


INLINE = ("loader.backend=inline", "loader.num_workers=0")

FAULTS = (
    Fault("loading_in_main_process", "loading_in_main_process", "cpu", _data(build_steps=1.5), INLINE, _workers(3)),
    Fault("too_few_workers", "too_few_workers", "cpu", _data(build_steps=2.5), _workers(1), _workers(4)),
    Fault("too_few_in_lockstep", "too_few_workers", "cpu", _data(build_steps=8), _workers(4), _workers(10), steps=120),
    Fault("cpu_bound_loading", "cpu_bound_loading", "cpu", _data(build_steps=4, how="spin"), _workers(2)),
    Fault("slow_samples", "slow_samples", "cpu", _data(build_steps=0.5, slow_every=300, slow_s=0.6), _workers(2)),
    Fault("loss_blows_up", "loss_blows_up", "cpu", (), ("workload.optimizer.lr=1000", "trainer.log_every_steps=2")),
)  # fmt: skip

HEALTHY = (
    Healthy("whole_batches", "cpu", _data(has_fetch="true")),
    Healthy("sample_by_sample", "cpu"),
    Healthy("workers", "cpu", (*_data(build_steps=0.5), *_workers(2))),
    Healthy("accumulated", "cpu", (*_data(has_fetch="true"), "memory.accumulate=2", "workload.model.rest_ms=6")),
)
