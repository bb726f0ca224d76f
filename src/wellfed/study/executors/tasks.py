"""Defines what a fork server can be asked to do and what it answers; without torch, as the study's own process is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.observe.hardware.facts import MachineFacts

if TYPE_CHECKING:
    from wellfed.data.backends.first_batches import FirstBatches
    from wellfed.plan.predict.peak import KnownFootprints


@dataclass(frozen=True)
class RunTimed:
    """Task: run a trial that is only timed. Answered by its exit code."""

    composed: Composed[RunConfig]
    plan: PointPlan | None = None
    """Plan of the point; None where planning ended its process."""
    feature_rows: Path | None = None
    """File of feature rows that were computed for all trials."""


@dataclass(frozen=True)
class TrainWhole:
    """Task: train to the end, or until the study ends the trial. Answered by its exit code."""

    composed: Composed[RunConfig]


@dataclass(frozen=True)
class PlanPoints:
    """Task: plan points without running any. Answered by a `MachineSeen`, then a `PointPlan` for each."""

    points: Sequence[tuple[str, Composed[RunConfig]]]
    """Id and configuration of each."""


@dataclass(frozen=True)
class ComputeRows:
    """Task: compute all feature rows on the CPU, for trials that would each do so."""

    file: Path
    """Exists afterwards only if all rows could be computed."""


@dataclass(frozen=True)
class SeeMetric:
    """Task: find the metric that ranks trials. Answered by a `MachineSeen`, then a `MetricSeen`."""

    config: RunConfig


@dataclass(frozen=True)
class MetricSeen:
    """Metric that picks the best checkpoint of a trial, and so the best trial."""

    name: str
    """Name in validation, without ``val/``."""
    mode: Literal["max", "min"]
    is_validated: bool
    """The data has a validation split."""


@dataclass(frozen=True)
class Validated:
    """Message of a trial after a validation. The reply is the reason to end it, or None."""

    number: int
    """Number of the validation, from 1."""
    value: float


@dataclass(frozen=True)
class MachineSeen:
    """This machine as trials see it."""

    description: str
    num_gpus: int
    processor: str = ""
    """Processor and number of cores: machines with equal GPUs may differ in them."""


@dataclass(frozen=True)
class PointPlan:
    """Facts about a point that are known before it runs. Its trials need not find them again."""

    point: str
    """Id of the point."""
    problem: str | None = None
    """Why it can't be run."""
    predicted_peak_gib: float | None = None
    first_batches: FirstBatches | None = None
    footprints: KnownFootprints | None = None
    keeps_rows: bool = False
    """Its trials keep the features that `ComputeRows` computes."""


def in_words(facts: MachineFacts) -> str:
    """Returns the processor and the cards of a machine."""
    cards = ", ".join(gpu.name for gpu in facts.training_gpus) or "no GPU"
    return f"{processor_of(facts)}; {cards}"


def processor_of(facts: MachineFacts) -> str:
    """Returns the processor of a machine and its number of cores."""
    return f"{facts.cpu}, {facts.cpu_quota_cores:g} cores"


def is_for_cpu(composed: Composed[RunConfig]) -> bool:
    """Returns whether a run trains on the processor, whatever else a machine has."""
    return composed.config.trainer.accelerator is Accelerator.cpu or composed.choices.get("gpu") == "cpu"


def shared_key(config: RunConfig) -> str:
    """Returns a text that is equal for configurations with the same data and model."""
    workload = config.workload
    has_optimizer = workload.optimizer is not None
    return json.dumps([workload.data, workload.model, has_optimizer, config.seed], sort_keys=True, default=str)
