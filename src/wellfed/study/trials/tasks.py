"""Names what the processes of a sweep can be asked to do and what they answer; without torch, as the sweep's own is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.study.sweep.grid import GridPoint

if TYPE_CHECKING:
    from wellfed.data.backends.first_batches import FirstBatches
    from wellfed.plan.predict.footprint import KnownFootprints


@dataclass(frozen=True)
class RunPoint:
    """Run one point: a trial."""

    point: GridPoint
    composed: Composed[RunConfig]
    plan: PointPlan | None = None
    """None = not planned; it is then tried on the processor's place."""
    feature_rows: Path | None = None
    """Where they are, computed for all trials that share them."""


@dataclass(frozen=True)
class PlanPoints:
    """Plan points without running any: answered by a `MachineSeen`, then a `PointPlan` for each."""

    points: Sequence[tuple[str, Composed[RunConfig]]]
    """Id and configuration."""


@dataclass(frozen=True)
class ComputeRows:
    """Compute all feature rows on the CPU, for trials that would each do so."""

    file: Path
    """Not there unless all could be computed."""


@dataclass(frozen=True)
class TrainWhole:
    """Train one point to its end, or until the sweep ends it: a trial of a search."""

    composed: Composed[RunConfig]


@dataclass(frozen=True)
class SeeMetric:
    """Tell what trials would be ranked by: answered by a `MachineSeen`, then a `MetricSeen`."""

    config: RunConfig


@dataclass(frozen=True)
class MetricSeen:
    """What picks the best checkpoint, and here the best trial."""

    name: str
    """Of validation, without ``val/``."""
    mode: Literal["max", "min"]
    is_validated: bool
    """There is something to validate on."""


@dataclass(frozen=True)
class Validated:
    """What a trial says after a validation; the reply is why it is to end, or None."""

    number: int
    """Of the validation, from 1."""
    value: float


@dataclass(frozen=True)
class MachineSeen:
    """The machine as trials see it."""

    description: str
    num_gpus: int
    processor: str = ""
    """And its cores: what two machines with the same GPUs may differ in."""


@dataclass(frozen=True)
class PointPlan:
    """What can be known of a point before it runs, and need not be found out once more by its trials."""

    point: str
    """Its id."""
    problem: str | None = None
    """Why it can't be run."""
    num_gpus: int = 0
    predicted_peak_gib: float | None = None
    first_batches: FirstBatches | None = None
    footprints: KnownFootprints | None = None
    keeps_rows: bool = False
    """Its trials keep the features that `ComputeRows` computes."""


def in_words(facts: MachineFacts) -> str:
    """A machine, as it is compared with another."""
    cards = ", ".join(gpu.name for gpu in facts.training_gpus) or "no GPU"
    return f"{processor_of(facts)}; {cards}"


def processor_of(facts: MachineFacts) -> str:
    """A processor and its cores."""
    return f"{facts.cpu}, {facts.cpu_quota_cores:g} cores"


def is_for_cpu(composed: Composed[RunConfig]) -> bool:
    """Whether it trains on the processor whatever else a machine has."""
    return composed.config.trainer.accelerator is Accelerator.cpu or composed.choices.get("gpu") == "cpu"


def shared_key(config: RunConfig) -> str:
    """Equal for configurations whose data and model are the same."""
    workload = config.workload
    has_optimizer = workload.optimizer is not None
    return json.dumps([workload.data, workload.model, has_optimizer, config.seed], sort_keys=True, default=str)
