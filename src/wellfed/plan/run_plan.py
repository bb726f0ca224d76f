"""Holds the plan of a run: a typed section for each group of knobs, with a reason for each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from wellfed.contract import FeatureModeName
from wellfed.errors import Fault
from wellfed.record.entries import PlanEntry, filled_in

Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)
Source = Literal["set", "predicted", "measured", "data"]


def left_to_loader(values: Mapping[str, Any], asked: Mapping[str, Any]) -> set[str]:
    """Returns the knobs of a plan that the user's own loader decides.

    Args:
        values: planned values by dotted knob.
        asked: ``loader`` of the configuration.
    """
    if values.get("loader.backend") != "own":
        return set()
    of_loader = [knob for knob in values if knob.startswith("loader.") and knob != "loader.backend"]
    return {knob for knob in of_loader if asked.get(knob.partition(".")[2]) is None}


@dataclass(frozen=True)
class Decided(Generic[Value_co]):
    """One decided number with its reason."""

    value: Value_co
    because: str
    source: Source


@dataclass(frozen=True, kw_only=True)
class Section:
    """Decided knobs of one group as plain values; `reasons` has the decisions."""

    group: ClassVar[str]
    """Name in the configuration."""
    reasons: Mapping[str, Decided[Any]]

    @classmethod
    def of(cls, decided: Mapping[str, Decided[Any]], **facts: Any) -> Self:
        """Returns a section from a decision for each knob; ``facts`` are the other fields."""
        values = {knob: each.value for knob, each in decided.items()}
        return cls(reasons=dict(decided), **values, **facts)

    def but(self, **decided: Decided[Any]) -> Self:
        """Returns a copy with other decisions for some knobs."""
        values: dict[str, Any] = {knob: each.value for knob, each in decided.items()}
        return replace(self, reasons={**self.reasons, **decided}, **values)

    def decided(self, knob: str) -> Decided[Any]:
        """Returns value and reason of a knob."""
        return replace(self.reasons[knob], value=getattr(self, knob))


@dataclass(frozen=True, kw_only=True)
class TrainerSection(Section):
    """Accelerator, strategy and number of devices."""

    group = "trainer"
    accelerator: Literal["cpu", "gpu"]
    devices: int
    """Devices per machine."""
    num_nodes: int = 1
    """Number of machines; shown if above 1."""
    strategy: Literal["auto", "ddp", "fsdp"]

    @property
    def world_size(self) -> int:
        """Number of ranks: processes that train together, one per device."""
        return self.num_nodes * self.devices


@dataclass(frozen=True, kw_only=True)
class DeviceSection(Section):
    """Memory and precision of each device."""

    group = "gpu"
    memory_gib: float | None
    """The budget; None = CPU training without a named card."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
    tf32: bool
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"]
    enforce: bool
    name: str
    """Name of the card or CPU."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSection(Section):
    """The learning problem; shown, never decided."""

    group = "workload"
    effective_batch_size: int


@dataclass(frozen=True, kw_only=True)
class MemorySection(Section):
    """Use of device memory."""

    group = "memory"
    micro_batch: int
    accumulate: int
    checkpoint_activations: bool
    features: FeatureModeName | None
    """None = the workload has no features."""
    on_oom: Literal["retry", "fail"]


@dataclass(frozen=True, kw_only=True)
class LoaderSection(Section):
    """How batches are built and brought to the device."""

    group = "loader"
    backend: Literal["torch", "inline", "threads", "processes", "own"]
    num_workers: int
    prefetch_factor: int | None
    """None = nothing is built ahead."""
    persistent_workers: bool
    pin_memory: bool
    device_prefetch: int
    timeout_s: float
    """0 = no limit."""
    candidates: tuple[str, ...]
    """Backends that ``loader.backend=auto`` may choose by their times; the first wins a tie."""
    has_fetch: bool
    """Whether the data return whole batches."""
    most_workers: int | None = None
    """Maximum number of workers that can share the data; None = any."""
    build_ms: float | None = None
    """Milliseconds per batch of a single worker before training; None = not timed."""

    @property
    def has_processes(self) -> bool:
        """Whether worker processes build the batches."""
        return self.num_workers > 0 and self.backend in ("torch", "processes", "own")


@dataclass(frozen=True)
class DevicePlan:
    """Decisions made before any data is read."""

    trainer: TrainerSection
    device: DeviceSection
    warnings: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        """Whether it trains on a GPU."""
        return self.trainer.accelerator == "gpu"


@dataclass(frozen=True)
class RunPlan(DevicePlan):
    """All decisions of a run."""

    workload: WorkloadSection
    memory: MemorySection
    loader: LoaderSection
    derived: Mapping[str, Decided[Any]] = field(default_factory=dict)
    """Values derived from the data, by dotted knob."""
    callbacks: Decided[str] | None = None
    """Names of the configured callbacks; None = no callbacks."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of device memory by purpose: at the predicted peak, or without an estimate all but activations."""
    predicted_peak_gib: float | None = None
    """GiB of tensors on each device; None without an estimate."""
    peak_moment: str | None = None
    misfit: Fault | None = None
    """Why the plan exceeds its budget, and what would fit."""
    remedies: tuple[str, ...] = ()
    """Overrides that each make the plan fit, cheapest first."""
    may_lower: tuple[str, ...] = ()
    """Which of ``memory.micro_batch`` and ``memory.checkpoint_activations`` this model allows to change."""
    refused: tuple[str, ...] = ()
    """Knobs that this model or its data refuse or do not use, as ``gpu.compile`` of a model that steps by hand."""
    feature_table_bytes: int = 0
    """Bytes of all features if they may be kept on the device; 0 without frozen features."""

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits its budget; None without a prediction."""
        return None if self.predicted_peak_gib is None else self.misfit is None

    @property
    def knobs(self) -> dict[str, Decided[Any]]:
        """All decisions by dotted knob, in display order."""
        sections: tuple[Section, ...] = (self.trainer, self.device, self.workload, self.memory, self.loader)
        knobs = {f"{each.group}.{knob}": each.decided(knob) for each in sections for knob in each.reasons}
        knobs |= self.derived
        knobs["memory.on_oom"] = knobs.pop("memory.on_oom")  # last, for when the others were wrong
        if self.callbacks is not None:
            knobs["callbacks"] = self.callbacks
        return knobs

    def filled_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a configuration with the decided values."""
        return filled_in(config, {knob: decided.value for knob, decided in self.knobs.items()})

    def to_dict(self) -> dict[str, PlanEntry]:
        """Returns ``{dotted knob: {value, because, source}}`` for run.json."""
        return {
            knob: {"value": one.value, "because": one.because, "source": one.source} for knob, one in self.knobs.items()
        }


@dataclass(frozen=True)
class DryPlan:
    """The plan of a run that does not start, by prediction alone."""

    plan: RunPlan
    imagined: str | None
    """Note about cards that this machine lacks."""
    workload: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``wellfed plan --json``."""
        plan = self.plan
        peak = {"budget_gib": plan.device.memory_gib, "predicted_peak_gib": plan.predicted_peak_gib}
        finding = {
            "id": "does_not_fit",
            "severity": "error",
            "evidence": peak,
            "message": str(plan.misfit),
            "change": list(plan.remedies),
            "changes_learning": False,
        }
        return {
            "fits": plan.fits,
            "workload": self.workload,
            "device": plan.device.name,
            "imagined": self.imagined,
            **peak,
            "peak_moment": plan.peak_moment,
            "parts": dict(plan.parts),
            "plan": plan.to_dict(),
            "findings": [] if plan.misfit is None else [finding],
            "warnings": list(plan.warnings),
        }


@dataclass(frozen=True)
class OwnLoader:
    """Facts about the user's loader of training, as the run will read it."""

    name: str
    """Its class, and that of its dataset."""
    values: Mapping[str, Any]
    """Knobs of ``loader`` as it has them, after the changes that were typed."""
    batch_size: int | None = None
    """Samples of a batch as it came; None = unknown."""
    num_samples: int | None = None
    """Samples of an epoch; None = unknown."""
    typed: frozenset[str] = frozenset()
    """Knobs of ``loader`` that were typed, or that its option sets."""
    has_own_batches: bool = False
    """Whether a batch sampler decides which samples a step has."""
    has_length: bool = True
    is_fixed: bool = False
    """Whether no knob can change it, since it is no DataLoader of torch."""
    shares_workers: bool = True
    """Whether workers share the samples. False for data read in order that do not ask for the worker's number."""
    shares_ranks: bool = True
    """Whether ranks share the samples. False for data read in order that do not ask for the rank."""
    has_worker_init: bool = False
    """Whether the DataLoader calls a function in each of its workers."""
    generators: tuple[str, ...] = ()
    """Types of the generators that the dataset holds."""


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data that the plan needs."""

    num_train: int
    has_fetch: bool
    feature_rows: int = 0
    feature_bytes: int = 0
    features_trainable: bool = False
    own_loader: OwnLoader | None = None
    """Loader of the training data; None = they came without one."""
    derived: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and reason of knobs that the data define."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model that the plan needs; bytes on the device."""

    parameter_bytes: int
    trainable_bytes: int
    optimizer_state_bytes: int
    has_batch_norm: bool = False
    has_blocks: bool = False
    """Whether the model has blocks that activation checkpointing can recompute."""
    whole_steps: bool = False
    """Whether Lightning's own Trainer makes the steps, of whole batches as it reads them."""
    brings_step: bool = False
    """Whether it brings its own step, optimizer and metrics, as a LightningModule does."""
    steps_by_hand: bool = False
    """Whether it is a LightningModule with manual optimization."""
    has_sparse_gradients: bool = False
    """Whether a weight has sparse gradients, e.g. with ``nn.Embedding(sparse=True)``."""
    average_bytes: int = 0
    """Bytes of a callback's average of the weights on the device."""

    @property
    def may_split(self) -> bool:
        """Whether its steps may run in micro-batches."""
        return not (self.has_batch_norm or self.whole_steps)


def as_set(knob: str, value: Any) -> str:
    """Returns ``knob=value`` as typed; empty for null."""
    return "" if value is None else f"{knob}={str(value).lower()}"


def by_rule(value: Value, because: str, *, is_set: bool = False) -> Decided[Value]:
    """Returns the decision of a rule of thumb; ``is_set`` marks a value that the user set."""
    return Decided(value, because, "set" if is_set else "predicted")


def unless_set(knob: str, asked: Value | None, value: Value, because: str) -> Decided[Value]:
    """Returns the user's value, else the decision of a rule of thumb."""
    return by_rule(value, because) if asked is None else Decided(asked, as_set(knob, asked), "set")
