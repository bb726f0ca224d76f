"""Entries of ``run.json``, and the record of a run. Its keys are a contract; docs/record.md describes each."""

from __future__ import annotations

import copy
import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from wellfed.errors import ErrorKind
from wellfed.masking import hidden_in
from wellfed.process import boot_id, is_alive, process_start
from wellfed.record.files import plain, write_atomically

SCHEMA = 2
FILE_NAME = "run.json"
Status = Literal["running", "ok", "oom", "failed", "killed", "timeout", "interrupted", "invalid", "infeasible"]
EventKind = Literal[
    "checkpoint", "resume", "oom", "step_down", "ladder", "restart", "checkpoint_damaged",
    "nan", "empty_step", "sample_skipped",
    "ceiling_failed", "ceiling_doubtful", "profile_failed", "logger_lost", "gpu_lost", "data_parallel",
    "metric_absent", "pruned", "telemetry_trouble", "page_failed", "disk_full", "signal", "unseen",
]  # fmt: skip
"""Kinds of events of a run; docs/record.md describes each with its facts."""


class OnEvent(Protocol):
    """A function that events of a run are passed to."""

    def __call__(self, kind: EventKind, **facts: Any) -> None:
        """Records an event that affects the figures; ``step=`` if it is not the run's latest."""


def ignore_event(kind: EventKind, **facts: Any) -> None:
    """Ignores the event."""


class ErrorEntry(TypedDict):
    """The error that ended a run."""

    kind: ErrorKind
    message: str
    advice: str


class GitState(TypedDict):
    """The checkout that a run was started from."""

    commit: str
    dirty: bool
    changed: list[str]
    """Names of files that differ from the commit, new ones included; at most 100."""
    digest: str
    """Digest of the uncommitted change; empty without one."""


class EngineState(TypedDict):
    """The engine that a run used."""

    version: str
    commit: str | None
    """None if installed from a wheel, or outside git."""
    dirty: bool
    """Whether the checkout of `commit` has uncommitted changes."""
    within_project: bool
    """Whether the engine is part of the project's checkout, so that ``git`` covers it."""


class TrialEntry(TypedDict):
    """Notes of a sweep, a search or a tune on a trial that has ended."""

    code: str
    """Version of the code."""
    attempt: int
    """Counts the attempts at this point, from 1."""
    number: int | None
    """Number of a whole training, from 0; None = a timed trial."""
    seconds: float
    """Duration, from the start of its process to its end."""
    ended_at: str
    """UTC, with microseconds."""


class WandbEntry(TypedDict):
    """The run in wandb."""

    id: str
    mode: str
    path: str
    parts: list[str]
    """A folder for each part of a resumed run."""


class LaunchEntry(TypedDict):
    """Processes that torchrun or srun started for a run."""

    by: Literal["torchrun", "srun"]
    job: str | None
    """Name of the job, the same after a restart; None = unnamed."""
    attempt: int
    """Number of earlier starts."""


class MachineEntry(TypedDict, total=False):
    """The machine at the start; empty until it was examined."""

    cpu: str
    cpu_quota_cores: float
    host_cores: int
    """CPUs of the machine; this process may be limited to fewer."""
    ram_gib: float
    shm_gib: float | None
    gpus: list[dict[str, Any]]
    versions: dict[str, str]
    os: str
    nvml_problem: str | None
    torch_problem: str | None


class HostEntry(TypedDict, total=False):
    """CPU and memory of the process; empty before training."""

    cpu_pct: float
    rss_gib: float
    core_wait_frac: float | None
    """Share of training in which the most delayed thread was ready but had no core; None = not counted."""


class PlanEntry(TypedDict):
    """One decided number."""

    value: Any
    because: str
    source: Literal["set", "predicted", "measured", "data"]


class Throughput(TypedDict):
    """The rate of training, over all ranks."""

    samples_per_s: float
    ci95: list[float] | None
    """Low and high of the 95 % interval."""
    steps: int
    warmup_steps: int
    sample_unit: str


class TimeEntry(TypedDict):
    """Duration of a step, and its shares."""

    wait_frac: float
    copy_frac: float | None
    compute_frac: float
    host_frac: float
    step_ms_mean: float
    step_ms_p50: float
    step_ms_p95: float
    launch_ms_p50: float | None
    """Time that the host took to launch forward, backward and optimizer; None on a CPU."""
    forward_frac: float | None
    """Part of ``compute_frac``, on the device's clock or else the host's; None if unknown. The three phases and other
    work add up to it."""
    backward_frac: float | None
    optimizer_frac: float | None
    forward_ms: float | None
    """Mean time of the host in the forward passes of a step."""
    backward_ms: float | None
    optimizer_ms: float | None
    device_forward_ms: float | None
    """Mean time of the device, over the steps whose phases it timed; None on a CPU."""
    device_backward_ms: float | None
    device_optimizer_ms: float | None
    phase_steps: int | None
    """Steps whose phases were timed by the clock of the shares."""


class StartEntry(TypedDict, total=False):
    """Seconds of each stage before training; stages that were not reached are absent."""

    imports_s: float
    """Libraries, and examining the machine."""
    data_s: float
    """Building data sets and model."""
    plan_s: float
    """Estimates, and timing of the first batches."""


class PhaseEntry(TypedDict):
    """Time and number of a run's visits to a phase."""

    total_s: float
    times: int


class WallEntry(TypedDict):
    """Wall time of training by kind, in seconds. All keys but the total add up to the total."""

    total_s: float
    """From the start of the Trainer to its end, with the validation after the last step."""
    start_s: float
    """Up to the first step: setting up, sanity checks."""
    steps_s: float
    """Waiting for batches, copying, computing and the loop between steps, without callbacks."""
    validation_s: float
    checkpoint_s: float
    epoch_end_s: float
    """Between the last step of an epoch and the first of the next."""
    logging_s: float
    """Writing rows of figures, and passing them to loggers."""
    callbacks: dict[str, float]
    """Seconds by ``ClassName.hook``, longest first: callbacks, hooks of the user's LightningModule, and learning-rate
    schedulers as ``ClassName.step``."""
    end_s: float
    """After the last step."""
    other_s: float


class MemoryEntry(TypedDict, total=False):
    """Device memory; empty before training."""

    device: str
    budget_gib: float | None
    predicted_peak_gib: float | None
    measured_peak_gib: float
    may_lower: list[str]
    """Knobs with which a step of this model may need less."""
    feature_table_gib: float | None
    """GiB of all features if they may be kept on the device; None without frozen features."""


class SwingEntry(TypedDict):
    """A periodic swing of a GPU's utilisation while a run trains."""

    period_s: float
    cause: str | None
    """Settings that imply the period, in words; None = no setting does."""


class RankEntry(TypedDict, total=False):
    """Latest figures of one of several ranks. Shares are as in `TimeEntry`."""

    rank: int
    node: int
    gpu: str | None
    """Its number, with the node of another machine: ``node1/0``; None on a CPU."""
    wait_frac: float
    copy_frac: float | None
    compute_frac: float
    host_frac: float
    step_ms_mean: float
    readiness_frac: float
    peak_gib: float | None
    """Peak of memory, measured as ``measured_peak_gib``; None if not measured."""
    host: str
    """Name of its machine."""
    steps: int
    """Steps behind the figures."""
    parameter_values: int
    """Trained values of its part of a watched script's model."""
    forward_frac: float | None
    """Part of ``compute_frac``, as in `TimeEntry`. The backward pass includes waiting for other ranks."""
    backward_frac: float | None
    optimizer_frac: float | None
    between_half_ms: float | None
    """Half the 95 % interval of its mean wait, copy and host time together."""
    work_half_ms: float | None
    """The same with forward pass and optimizer: own work of a rank, in which it waits for no other one."""


class LoadingEntry(TypedDict, total=False):
    """Time to build a batch after the warm-up, in any process or thread; unknown keys are absent."""

    build_ms_mean: float
    build_ms_p50: float
    build_ms_p99: float
    cpu_frac: float
    """CPU time over wall time of building; the rest is waiting for a disk, a network, a lock or a core."""
    batch_mib: float
    """MiB of the tensors of one rank's batch."""
    build_ms_alone: float
    """Milliseconds that a single worker took per batch before training; absent = not timed."""
    has_fetch: bool
    """Whether the data returns whole batches (``fetch``)."""
    most_workers: int
    """Maximum number of workers that can share a stream; absent = unlimited."""


class SynchronisationEntry(TypedDict):
    """A line of code at which the host waits for the device in each step."""

    place: str
    """``file:line``."""
    per_step: float


class OperationEntry(TypedDict):
    """An operation of torch in the profiled steps."""

    name: str
    calls: int
    """Number in all profiled steps. If sorted by device time: kernels and copies launched."""
    ms_per_step: float
    """On a device: time of its kernels and copies. On the CPU: without calls inside it."""
    share_frac: float
    """Share of the time of all operations."""


class ProfileEntry(TypedDict):
    """Operations of the steps that torch's profiler recorded. Device shares are None if only the host was recorded."""

    steps: int
    by: Literal["device", "cpu"]
    step_ms: float
    """Wall time of a step, including the profiler's overhead."""
    operations: list[OperationEntry]
    """The largest, at most 20."""
    device_busy_frac: float | None
    """Share of the profiled time in which at least one kernel ran."""
    copy_ms_per_step: float | None
    """Copies between host and device, or from one device to another."""


class GainEntry(TypedDict):
    """Factor by which the rate is expected to rise, with its bounds."""

    factor: float
    low: float
    high: float
    text: str
    """The same in words: ``about 2.1 times as fast (1.50 to 2.5), predicted``."""


class FindingEntry(TypedDict):
    """A cause of lost time, or a remark; see `wellfed.explain.diagnosis.finding`."""

    id: str
    severity: Literal["high", "medium", "low", "info"]
    message: str
    advice: str
    """Action where no override helps; empty if there is none."""
    evidence: dict[str, Any]
    change: list[str]
    changes_learning: bool
    gain: GainEntry | None
    text: str
    """Message, overrides and gain, as on a screen."""


@dataclass
class RunRecord:
    """The record of a run. Its keys are a contract with reports, sweeps and users' scripts; docs/record.md describes
    each."""

    run_id: str
    schema: int = SCHEMA
    status: Status = "running"
    error: ErrorEntry | None = None
    exit_code: int | None = None
    ended_by: str | None = None
    """Limit or request that ended a successful training."""
    started_at: str = ""
    duration_s: float = 0.0
    seed: int | None = None
    resumed_from: str | None = None
    pid: int = 0
    host_name: str = ""
    boot_id: str = ""
    process_start: int | None = None
    """Start of the process, in clock ticks since boot; None if the system does not report it."""
    launch: LaunchEntry | None = None
    """None if this process was started alone."""
    git: GitState | None = None
    engine: EngineState | None = None
    wandb: WandbEntry | None = None
    mlflow: dict[str, str] | None = None
    """``run_id`` and ``uri`` of the run in mlflow."""
    workload: str = ""
    overrides: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    """Arguments that read the same files of configurations again, from any folder: flags, and Hydra's own overrides."""
    steps: int = 0
    epochs: float | None = 0
    samples: int = 0
    machine: MachineEntry = field(default_factory=MachineEntry)
    host: HostEntry = field(default_factory=HostEntry)
    plan: dict[str, PlanEntry] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Knobs that this model or its data refuse or do not use, so that no finding advises them."""
    throughput: Throughput | None = None
    ceiling: dict[str, float] | None = None
    """``samples_per_s`` with batches already on the device."""
    readiness_frac: float | None = None
    time: TimeEntry | None = None
    before_training: StartEntry = field(default_factory=StartEntry)
    phases: dict[str, PhaseEntry] = field(default_factory=dict)
    """Phase, as in telemetry.csv -> time and number of visits."""
    wall: WallEntry | None = None
    """None if not measured."""
    loading: LoadingEntry = field(default_factory=LoadingEntry)
    process: dict[str, int] | None = None
    """``parameter_values`` that a watched script trains; None if training did not finish."""
    ranks: list[RankEntry] = field(default_factory=list)
    """Figures of each rank. Empty for one rank; all other figures are of rank 0."""
    synchronisations: list[SynchronisationEntry] | None = None
    """None if not searched for, as on a CPU."""
    profile: ProfileEntry | None = None
    memory: MemoryEntry = field(default_factory=MemoryEntry)
    gpus: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures of each GPU, by its number."""
    telemetry: dict[str, float] | None = None
    """``interval_s`` of readings and ``cpu_frac``, their cost."""
    swing: SwingEntry | None = None
    findings: list[FindingEntry] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Each with its ``kind`` (`EventKind`), ``step``, ``time_s`` and facts of that kind."""
    metrics: dict[str, float] = field(default_factory=dict)
    trial: TrialEntry | None = None
    """None if this is no trial of a study, or one that has not ended."""
    tested: str | None = None
    """Checkpoint that the test split was evaluated with; None = not tested."""
    artifacts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, run_id: str) -> RunRecord:
        """Returns a record of a run that begins now in this process."""
        return cls(
            run_id=run_id,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            pid=os.getpid(),
            host_name=socket.gethostname(),
            boot_id=boot_id(),
            process_start=process_start(os.getpid()),
        )

    @classmethod
    def read(cls, folder: Path | str) -> RunRecord:
        """Reads the record of a run folder; keys that are missing get their defaults, unknown ones are left out.

        Raises as `read` does.
        """
        found, empty = read(Path(folder)), cls("")
        known = {name: value for name, value in found.items() if name in cls.__dataclass_fields__}
        for name, value in known.items():
            if not _is_like(value, getattr(empty, name), str(cls.__dataclass_fields__[name].type)):
                raise ValueError(f"{Path(folder) / FILE_NAME} is damaged: {name} can't be {json.dumps(value)[:40]}.")
        return cls(**known)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the run is known to have trained on a CPU. It may have watched GPUs that others use."""
        accelerator = self.plan.get("trainer.accelerator")
        if accelerator is not None:
            return bool(accelerator["value"] == "cpu")
        return self.time is not None and self.time["copy_frac"] is None

    def derived(self) -> dict[str, Any]:
        """Returns values derived from the data, by dotted knob."""
        return {knob: entry["value"] for knob, entry in self.plan.items() if entry["source"] == "data"}

    def filled_config(self) -> dict[str, Any]:
        """Returns the configuration with the values derived from the data."""
        return filled_in(self.config, self.derived())

    def to_json(self) -> str:
        """Returns strict JSON, with null for numbers that are not finite, and with secrets masked."""
        return json.dumps(hidden_in(plain(vars(self))), indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Replaces ``run.json`` in ``folder`` as a whole. An OSError leaves the old file."""
        write_atomically(folder / FILE_NAME, self.to_json())


def read(folder: Path) -> dict[str, Any]:
    """Returns the record of a run folder as plain data; ``running`` of a dead process on this host is ``killed``.

    Raises:
        OSError: the record is missing or unreadable.
        ValueError: the file is damaged, no record, or has an unknown schema.
    """
    path = folder / FILE_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise ValueError(f"{path} is damaged: {cause}.") from cause
    if not (isinstance(record, dict) and {"schema", "run_id", "status"} <= record.keys()):
        raise ValueError(f"{path} is not a run record.")
    if record["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {record['schema']}; this version of wellfed reads schema {SCHEMA}.")
    if record["status"] == "running" and not is_alive(record):
        record["status"] = "killed"
    return record


def _is_like(value: Any, default: Any, annotation: str) -> bool:
    """Returns whether a field may have a value, by the type of its default; entries of dicts of numbers count, too."""
    if value is None or default is None:
        return default is None or annotation.endswith("None")
    if annotation == "dict[str, float]" and isinstance(value, dict):
        return all(isinstance(each, int | float | None) for each in value.values())
    return isinstance(value, int | float if isinstance(default, int | float) else type(default))


def filled_in(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``config`` with ``values`` set, by dotted knob."""
    filled = copy.deepcopy(dict(config))
    for dotted, value in values.items():
        *groups, knob = dotted.split(".")
        node = filled
        for group in groups:
            node = node.setdefault(group, {})
        node[knob] = value
    return filled


def differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Returns ``(dotted name, old, new)`` of every leaf that differs between two trees."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            found += differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
        return found
    is_nan = isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new)
    return [] if is_nan or old == new else [(name, old, new)]
