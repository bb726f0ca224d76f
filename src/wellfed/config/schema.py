"""Every knob: its type, default, unit, range and when to change it.

One dataclass a group; the string literal under a field is its help text (`wellfed.config.docs.help_of`).
Yaml files hold values only. ``null`` in a numeric knob means that the plan decides and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import MISSING

# OmegaConf reads these annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045

Precision = Enum(
    "Precision",
    {
        "auto": "auto",
        "32-true": "32-true",
        "bf16-mixed": "bf16-mixed",
        "16-mixed": "16-mixed",
        "bf16-true": "bf16-true",
    },
)


class SweepStatus(Enum):
    """How a trial may have ended."""

    ok = "ok"
    oom = "oom"
    failed = "failed"
    killed = "killed"
    timeout = "timeout"


class SweepObjective(Enum):
    """What ranks the points of a sweep."""

    samples_per_s = "samples_per_s"
    samples_per_joule = "samples_per_joule"
    peak_memory = "peak_memory"


class Compile(Enum):
    """torch.compile modes."""

    none = "none"
    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"


class Allocator(Enum):
    """CUDA caching allocator settings."""

    default = "default"
    expandable = "expandable"


class Backend(Enum):
    """Who builds batches."""

    auto = "auto"
    torch = "torch"
    inline = "inline"
    threads = "threads"
    processes = "processes"


class FeatureMode(Enum):
    """Where precomputed features live."""

    cache = "cache"
    cache_host = "cache_host"
    dynamic = "dynamic"


class OnOom(Enum):
    """What an out-of-memory error does."""

    retry = "retry"
    fail = "fail"


class Accelerator(Enum):
    """Device kinds a run may use."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class Strategy(Enum):
    """How ranks share the work."""

    auto = "auto"
    ddp = "ddp"
    fsdp = "fsdp"


OnNan = Enum("OnNan", {"raise": "raise", "skip": "skip", "halve_lr": "halve_lr"})


class BestMode(Enum):
    """Direction of the best metric."""

    max = "max"
    min = "min"


class LoggerMode(Enum):
    """Where wandb writes."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class ScheduleName(Enum):
    """Learning rate schedules."""

    constant = "constant"
    cosine = "cosine"


@dataclass
class GpuConfig:
    """What the card offers."""

    memory_gib: Optional[float] = None
    """GPU memory budget in GiB, > 0. null = what the profile or, with gpu=auto, the card gives. Lower it to rehearse
    a smaller card."""
    precision: Precision = Precision["auto"]
    """auto, 32-true, bf16-mixed, 16-mixed or bf16-true. auto: bf16-mixed from capability 8.0, 16-mixed at 7.x, else
    (and on a CPU) 32-true. Only a precision typed here is refused where the device can't do it."""
    tf32: bool = True
    """Let float32 matrix products and convolutions use TF32 on CUDA. Turn off where 1e-3 relative error matters."""
    channels_last: bool = False
    """Keep image tensors in NHWC memory order. Faster convolutions with AMP; no use without convolutions."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each new shape. For fixed shapes only."""
    compile: Compile = Compile.none
    """torch.compile: none, default, reduce_overhead or max_autotune. Costs seconds to minutes at the start; a compile
    that fails warns and goes on eagerly."""
    enforce: Optional[bool] = None
    """Hold the run to the budget. null = true on a GPU, false on a CPU. true on a CPU limits this process's memory in
    the card's place (Linux)."""
    ballast: bool = False
    """With enforce: fill the rest of a larger card, so that libraries that ask the driver for free memory see the
    smaller card too."""
    allocator: Allocator = Allocator.default
    """default or expandable (segments that grow: less fragmentation when shapes vary)."""


@dataclass
class LoaderConfig:
    """Disk to device."""

    backend: Backend = Backend.auto
    """auto, torch (DataLoader over `__getitem__` with default collate), inline (in the training process), threads or
    processes."""
    num_workers: Optional[int] = None
    """Producers (threads or processes), >= 0. null = from the CPU quota. 0 belongs to inline and torch."""
    prefetch_factor: Optional[int] = None
    """Batches each producer keeps ready, >= 1; costs host memory. Needs num_workers >= 1."""
    device_prefetch: Optional[int] = None
    """Batches copied to the GPU ahead of the step, >= 0, beside the one in use. null = planned; 0 on a CPU."""
    worker_threads: Optional[int] = None
    """torch threads in each producer, >= 1. null = torch's default."""
    timeout_s: Optional[int] = None
    """Seconds to wait for one batch before the loader counts as stuck, >= 0; 0 = for ever."""
    persistent_workers: Optional[bool] = None
    """Keep worker processes from one epoch to the next. null = true where there are any."""
    pin_memory: Optional[bool] = None
    """Batches in page-locked host memory, so that copies overlap. null = on CUDA only."""
    skip_ids: list[int] = field(default_factory=list)
    """Indices of training samples, >= 0, never asked for: known bad ones."""
    max_skipped: int = 0
    """Samples that may fail to load, and are then left out and named, before the run stops. >= 0."""


@dataclass
class StageConfig:
    """One entry of memory.stages."""

    from_epoch: int = 0
    """First epoch (from 0) in which the stage holds."""
    features: FeatureMode = FeatureMode.cache
    """Feature mode of the stage."""


@dataclass
class MemoryConfig:
    """What sits in GPU memory and how to shrink it."""

    features: Optional[FeatureMode] = None
    """cache (GPU), cache_host (RAM) or dynamic (computed per batch). null = the fastest that fits. Only dynamic can
    train an encoder."""
    micro_batch: Optional[int] = None
    """Samples per forward pass and device, >= 1. null = planned. At most one of micro_batch and accumulate is set."""
    accumulate: Optional[int] = None
    """Forward passes per optimizer step, >= 1. null = derived from micro_batch."""
    checkpoint_activations: Optional[bool] = None
    """Recompute activations in the backward pass: less memory, about a third more compute. null = no."""
    plateau_frac: Optional[float] = None
    """Take the smallest micro-batch that keeps this fraction, 0..1, of the best rate. null = the largest that fits."""
    on_oom: OnOom = OnOom.retry
    """retry (halve the micro-batch and do the same batch again) or fail."""
    micro_batch_steps: Optional[list[int]] = None
    """Micro-batches to step down through on out-of-memory, >= 1, descending. null = halve."""
    stages: Optional[list[StageConfig]] = None
    """Feature modes by epoch, e.g. cache first, then dynamic. null = one mode throughout."""


@dataclass
class ScheduleConfig:
    """Learning rate over the run."""

    name: ScheduleName = ScheduleName.constant
    """constant, or cosine down to min_lr_frac at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0, >= 0."""
    min_lr_frac: float = 0.0
    """Final learning rate of cosine as a fraction of the first, 0..1."""


@dataclass
class WorkloadConfig:
    """What is learned: everything here changes the result."""

    name: str = MISSING
    """Name of the workload; also the folder under paths.log_dir."""
    sample_unit: str = "samples"
    """What one sample is called in figures (triplets, windows, patches)."""
    effective_batch_size: int = MISSING
    """Samples per optimizer step over all ranks, >= 1; kept exactly, however it is split."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch. Validation never does."""
    model: Any = MISSING
    """`_target_` of an nn.Module and its arguments."""
    data: Any = MISSING
    """`_target_` of a function that returns Datasets, and its arguments."""
    optimizer: Any = None
    """`_target_` of a torch optimizer and its arguments. null for a LightningModule that brings its own."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate schedule."""


@dataclass
class TrainerConfig:
    """How long, and where."""

    max_epochs: Optional[int] = None
    """Passes over the training data, >= 1. The first limit reached ends the run."""
    max_steps: Optional[int] = None
    """Optimizer steps, >= 1."""
    max_time_s: Optional[float] = None
    """Seconds of training, > 0."""
    validate_every_steps: Optional[int] = None
    """Optimizer steps between validations, >= 1. null = at the end of each epoch."""
    checkpoint_every_steps: Optional[int] = None
    """Optimizer steps between checkpoints, >= 1. null = at the end of each epoch and by checkpoint_minutes."""
    checkpoint_minutes: Optional[float] = 10.0
    """Longest time between checkpoints, minutes, > 0. null = no limit."""
    keep_last: int = 2
    """Latest checkpoints kept, >= 1; best is kept beside them."""
    log_every_steps: int = 50
    """Optimizer steps between rows of metrics.csv, >= 1."""
    gradient_clip: Optional[float] = None
    """Largest gradient norm, > 0. null = no clipping."""
    accelerator: Accelerator = Accelerator.auto
    """auto, cpu or gpu."""
    devices: int = 1
    """Devices (ranks) on this machine, >= 1."""
    strategy: Strategy = Strategy.auto
    """auto, ddp or fsdp (CUDA only)."""
    on_nan: OnNan = OnNan["raise"]
    """A non-finite loss: raise (stop), skip (leave out the step) or halve_lr (leave it out, and halve the rate)."""
    deterministic: bool = False
    """Only deterministic kernels; slower on a GPU."""
    limit_batches: Optional[int] = None
    """At most so many batches per epoch and per evaluation, >= 1: a quick look, not a result."""
    overfit_batches: Optional[int] = None
    """Train on the first so many batches of the first epoch again and again, unshuffled, >= 1: can the model learn?"""
    profile_steps: Optional[int] = None
    """Steps recorded by torch.profiler after a short warm-up, >= 1, into profile.json of the run folder."""
    best_metric: Optional[str] = None
    """Validation metric that picks the best checkpoint. null = the workload's."""
    best_mode: Optional[BestMode] = None
    """max or min. null = the workload's."""


@dataclass
class TelemetryConfig:
    """What is watched, and how often."""

    enabled: bool = True
    """Watch the GPUs and this process while training; false also leaves out the ceiling."""
    interval_s: float = 0.5
    """Seconds between readings of utilisation, memory and CPU, 0.1..3600; what changes slowly is read every 5 s. Lower
    it to see swings shorter than 5 s; each reading costs a millisecond or two of CPU."""
    ceiling_steps: int = 20
    """Steps run at the end on batches already on the device, to tell how fast the run could be, >= 0; 0 = none."""


@dataclass
class LoggerConfig:
    """Where figures go beside the files, which are always written."""

    mode: LoggerMode = LoggerMode.auto
    """auto (online when logged in, else offline), online, offline or disabled."""
    project: str = "wellfed"
    """wandb project."""
    entity: Optional[str] = None
    """wandb user or team. null = wandb's default."""
    group: Optional[str] = None
    """wandb group of this run."""


@dataclass
class SweepConfig:
    """Many short runs to find the fastest settings; an option of this group says which, in hydra.sweeper.params."""

    name: Optional[str] = None
    """Folder of the sweep, <log_dir>/<workload>/sweeps/<name>; the same name goes on with what is missing there. null =
    the name of the chosen option."""
    max_trials: int = 100
    """Largest number of combinations that are run without asking, >= 1."""
    trial_steps: int = 200
    """Optimizer steps measured in a trial at most, >= 10; it ends sooner where the 95 % interval of samples/s is within
    2 %."""
    timeout_s: float = 600
    """Seconds after which a trial is ended and noted as timeout, 0..1e+06 (not 0 itself); preparing data and model may
    take as long again."""
    objective: SweepObjective = SweepObjective.samples_per_s
    """What ranks the points, and picks those that are measured again: samples_per_s, samples_per_joule (needs GPUs that
    NVML reads power or energy of) or peak_memory (the least first). The same command with another one ranks anew what is
    measured already."""
    fail_fast: bool = False
    """Start no further trial after one that did not end well."""
    retry: list[SweepStatus] = field(default_factory=list)
    """Statuses whose trials are run again, e.g. [oom,failed]."""


@dataclass
class PathsConfig:
    """Where files are read and written."""

    log_dir: str = "logs"
    """Run folders go to <log_dir>/<workload>/runs/; relative to the working directory."""
    cache_dir: str = ".cache"
    """Caches: <cache_dir>/<kind>/<digest>/; may be deleted at any time."""


@dataclass
class GuardConfig:
    """What a configuration may name."""

    allow_targets: list[str] = field(default_factory=lambda: ["torch", "wellfed", "workloads"])
    """Packages that a `_target_` may come from. Add your own package here."""


@dataclass
class RunConfig:
    """One run of `python src/train.py`."""

    seed: int = 1
    """Seed of everything random, >= 0."""
    resume: Optional[str] = None
    """auto, a run folder or a checkpoint: go on where it stopped."""
    rerun: Optional[str] = None
    """A run folder whose overrides are replayed into a new one."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    """What the card offers."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Disk to device."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What sits in GPU memory and how to shrink it."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    """What is learned."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long, and where."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """What is watched."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where figures go beside the files."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Which combinations `-m sweep=<option>` runs, and for how long."""
    paths: PathsConfig = field(default_factory=PathsConfig)
    """Where files are read and written."""
    config: GuardConfig = field(default_factory=GuardConfig)
    """What a configuration may name."""


@dataclass
class EvaluateConfig:
    """One run of `python src/evaluate.py`."""

    checkpoint: str = MISSING
    """Checkpoint file whose test metrics are wanted; its run folder gives the configuration."""
    accelerator: Accelerator = Accelerator.auto
    """auto, cpu or gpu."""
    paths: PathsConfig = field(default_factory=PathsConfig)
    """Where files are read and written."""
