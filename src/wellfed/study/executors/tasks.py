"""Describes points, machines and what trials share; without torch, as the study's own process is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.record import Status

if TYPE_CHECKING:
    from wellfed.data.backends.first_batches import FirstBatches
    from wellfed.plan.predict.peak import KnownFootprints


@dataclass(frozen=True)
class PointPlan:
    """Facts about a point that are known before it runs. Its trials need not find them again."""

    point: str
    """Id of the point."""
    problem: str | None = None
    """Why it can't be run."""
    status: Status = "infeasible"
    """Status of its row in that case."""
    predicted_peak_gib: float | None = None
    first_batches: FirstBatches | None = None
    footprints: KnownFootprints | None = None


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
