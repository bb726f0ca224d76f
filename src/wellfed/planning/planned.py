"""What a plan is made of: one decided number with its reason, and the facts that decisions need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wellfed.errors import Fault
from wellfed.record import PlanEntry

Source = Literal["set", "predicted", "measured"]


@dataclass(frozen=True)
class Planned:
    """One decided number."""

    value: Any
    because: str
    source: Source


@dataclass(frozen=True)
class DataFacts:
    """What the plan needs to know of the data."""

    num_train: int
    has_fetch: bool
    is_iterable: bool = False
    num_eval: int = 0
    """Samples of the larger of validation and test."""
    feature_rows: int = 0
    feature_bytes: int = 0
    features_trainable: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of the model; bytes on the device."""

    parameter_bytes: int
    trainable_bytes: int
    optimizer_state_bytes: int
    gathered_bytes: int = 0
    """Of a sharded model: what is whole on each device at a time."""
    has_batch_norm: bool = False
    has_blocks: bool = False
    """Activation checkpointing finds parts that it can recompute."""
    is_lightning_module: bool = False
    steps_by_hand: bool = False
    """A LightningModule with manual optimization."""
    has_sparse_gradients: bool = False
    """As ``nn.Embedding(sparse=True)`` gives its weight."""


@dataclass(frozen=True)
class RunPlan:
    """All decisions of a run; ``knobs`` is what goes into run.json."""

    knobs: Mapping[str, Planned]
    budget_gib: float | None
    cap: bool
    device_name: str
    warnings: tuple[str, ...] = ()
    workspaces: int = 0
    """Bytes that libraries keep of the device's memory for themselves."""
    eval_workers: int = 0
    """Producers of an evaluation on each device; 0 = the training process builds its batches."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Device memory by what needs it, bytes: at the predicted peak, or without an estimate all but activations."""
    predicted_peak_gib: float | None = None
    """What the allocator will reserve on each device; None where nothing could be estimated."""
    peak_moment: str | None = None
    misfit: Fault | None = None
    """Why this plan does not fit its budget, and what would."""
    remedies: tuple[str, ...] = ()
    """With a misfit: overrides, each of which makes it fit, cheapest first."""

    def __getitem__(self, knob: str) -> Any:
        """The decided value of a dotted knob."""
        return self.knobs[knob].value

    def to_dict(self) -> dict[str, PlanEntry]:
        """``{dotted knob: {value, because, source}}``."""
        return {
            knob: PlanEntry(value=one.value, because=one.because, source=one.source) for knob, one in self.knobs.items()
        }


def as_set(knob: str, value: Any) -> str:
    """``knob=value`` as typed; empty for a knob that was left to the plan."""
    return "" if value is None else f"{knob}={str(value).lower()}"


def planned(value: Any, because: str, is_set: bool) -> Planned:
    """A value that the user set, or that a rule of thumb gave."""
    return Planned(value, because, "set" if is_set else "predicted")
