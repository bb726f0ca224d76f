"""Declares every knob: its type, default, meaning with unit, range, and when to change it.

Each dataclass is a group; its docstring is the group's text for users. Yaml files hold values only. ``null`` in a
numeric knob means that the plan decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Optional

from omegaconf import MISSING

from wellfed.config.knobs import Range

# OmegaConf reads these annotations at run time and knows Optional[X], not X | None; knob() makes a field().
# ruff: noqa: RUF009, UP045


def knob(default: Any, text: str, **limits: float) -> Any:
    """Returns a field of a group: its default, its text for users, and the `Range` of its numbers."""
    metadata = {"text": text, "range": Range(**limits) if limits else None}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


# Allowed names of knobs with a choice; a mapping if mypy must know the values too.
Precision = StrEnum("Precision", ["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"])
Compile = StrEnum(
    "Compile",
    {
        "none": "none",
        "default": "default",
        "reduce-overhead": "reduce-overhead",
        "max-autotune": "max-autotune",
        # Spellings of 0.1, still accepted as aliases of torch's.
        "reduce_overhead": "reduce-overhead",
        "max_autotune": "max-autotune",
    },
)
Allocator = StrEnum("Allocator", ["default", "expandable"])
Backend = StrEnum("Backend", ["auto", "torch", "inline", "threads", "processes", "own"])
FeatureMode = StrEnum("FeatureMode", ["cache", "cache_host", "dynamic"])
OnOom = StrEnum("OnOom", ["retry", "fail"])
OnNan = StrEnum("OnNan", {"raise": "raise", "skip": "skip", "halve_lr": "halve_lr"})
Accelerator = StrEnum("Accelerator", ["auto", "cpu", "gpu"])
Strategy = StrEnum("Strategy", ["auto", "ddp", "fsdp"])
BestMode = StrEnum("BestMode", ["max", "min"])
LoggerMode = StrEnum("LoggerMode", ["auto", "online", "offline", "disabled"])
ScheduleName = StrEnum("ScheduleName", {"constant": "constant", "cosine": "cosine", "linear": "linear"})
ScheduleInterval = StrEnum("ScheduleInterval", {"step": "step", "epoch": "epoch"})
SweepObjective = StrEnum("SweepObjective", ["samples_per_s", "samples_per_joule", "peak_memory"])
TuneWrite = StrEnum("TuneWrite", ["auto", "always", "never"])
SweepStatus = StrEnum("SweepStatus", ["ok", "oom", "failed", "killed", "timeout"])
SearchSampler = StrEnum("SearchSampler", ["grid", "tpe", "random"])
SearchPruner = StrEnum("SearchPruner", ["none", "median", "asha"])


@dataclass
class GpuConfig:
    """Card: memory budget, precision, compilation, allocator."""

    memory_gib: Optional[float] = knob(
        None,
        "GPU memory budget in GiB. null = what the profile or, with gpu=auto, the card gives. Lower it to rehearse a "
        "smaller card.",
        above=0,
    )
    precision: Precision = knob(
        Precision["auto"],
        "auto, 32-true, bf16-mixed, 16-mixed or bf16-true. auto: bf16-mixed from capability 8.0, 16-mixed at 7.x, "
        "else (and on a CPU) 32-true. Only a precision typed here is refused where the device can't do it.",
    )
    tf32: bool = knob(
        True,
        "Let float32 matrix products and convolutions use TF32 on CUDA. Turn off where 1e-3 relative error matters.",
    )
    channels_last: bool = knob(
        False, "Keep image tensors in NHWC memory order. Faster convolutions with AMP; no use without convolutions."
    )
    cudnn_benchmark: bool = knob(False, "Let cuDNN time its algorithms for each new shape. For fixed shapes only.")
    compile: Compile = knob(
        Compile.none,
        "torch.compile: none, or its mode: default, reduce-overhead or max-autotune. Costs seconds to minutes at the "
        "start; a compile that fails warns and goes on eagerly.",
    )
    enforce: Optional[bool] = knob(
        None,
        "Hold the run to the budget. null = true on a GPU, false on a CPU. true on a CPU limits this process's "
        "memory in the card's place (Linux).",
    )
    ballast: bool = knob(
        False,
        "With enforce: fill the rest of a larger card, so that libraries that ask the driver for free memory see the "
        "smaller card too.",
    )
    allocator: Allocator = knob(
        Allocator.default, "default or expandable (segments that grow: less fragmentation when shapes vary)."
    )


@dataclass
class LoaderConfig:
    """Disk to device."""

    backend: Backend = knob(
        Backend.auto,
        "auto, torch (DataLoader over `__getitem__` with default collate), inline (in the training process), threads, "
        "processes, or own (a DataLoader that workload.data returns, left as it came).",
    )
    num_workers: Optional[int] = knob(
        None, "Workers (threads or processes). null = from the CPU quota. 0 belongs to inline and torch.", at_least=0
    )
    prefetch_factor: Optional[int] = knob(
        None, "Batches each worker keeps ready; costs host memory. Needs num_workers >= 1.", at_least=1
    )
    device_prefetch: Optional[int] = knob(
        None,
        "Batches copied to the GPU ahead of the step, beside the one in use. null = planned; 0 on a CPU.",
        at_least=0,
    )
    worker_threads: Optional[int] = knob(None, "torch threads in each worker. null = torch's default.", at_least=1)
    timeout_s: Optional[int] = knob(
        None, "Seconds to wait for one batch before the loader counts as stuck; 0 = for ever.", at_least=0
    )
    persistent_workers: Optional[bool] = knob(
        None, "Keep worker processes from one epoch to the next. null = true where there are any."
    )
    pin_memory: Optional[bool] = knob(
        None, "Batches in page-locked host memory, so that copies overlap. null = on CUDA only."
    )
    shuffle_buffer: Optional[int] = knob(
        None,
        "Samples of a stream that are held, to draw the next from; costs host memory. Changes the order, and so what "
        "is learned. null = the stream's own order.",
        at_least=2,
    )
    skip_ids: list[int] = knob([], "Indices of training samples, never asked for: known bad ones.", at_least=0)
    max_skipped: int = knob(
        0, "Samples that may fail to load, and are then left out and named, before the run stops.", at_least=0
    )


@dataclass
class MemoryStage:
    """One entry of memory.stages."""

    from_epoch: int = knob(MISSING, "Its first epoch, from 0.")
    features: FeatureMode = knob(MISSING, "As memory.features, from that epoch on.")


@dataclass
class MemoryConfig:
    """GPU memory: features, micro-batches, checkpointing, out-of-memory errors."""

    features: Optional[FeatureMode] = knob(
        None,
        "cache (GPU), cache_host (RAM) or dynamic (computed per batch). null = the fastest that fits. Only dynamic "
        "can train an encoder.",
    )
    micro_batch: Optional[int] = knob(
        None,
        "Samples per forward pass and device. null = planned. At most one of micro_batch and accumulate is set.",
        at_least=1,
    )
    accumulate: Optional[int] = knob(
        None, "Forward passes per optimizer step. null = derived from micro_batch.", at_least=1
    )
    checkpoint_activations: Optional[bool] = knob(
        None, "Recompute activations in the backward pass: less memory, about a third more compute. null = no."
    )
    plateau_frac: Optional[float] = knob(
        None,
        "Take the smallest micro-batch that keeps this fraction of the best rate, by real steps before training; where "
        "none are run (several devices, gpu.compile) a quarter of a step. null = the largest that fits.",
        above=0,
        at_most=1,
    )
    on_oom: OnOom = knob(OnOom.retry, "retry (halve the micro-batch and do the same batch again) or fail.")
    micro_batch_steps: Optional[list[int]] = knob(
        None, "Micro-batches to step down through on out-of-memory, descending. null = halve.", at_least=1
    )
    remember: bool = knob(
        True,
        "Begin with the micro-batch that an earlier run of the same plan had to go down to, kept in paths.cache_dir. "
        "false = neither read nor kept.",
    )
    stages: Optional[list[MemoryStage]] = knob(
        None,
        "Features held otherwise from an epoch on: [{from_epoch: 0, features: cache}, {from_epoch: 3, features: "
        "dynamic}], each stage with a micro-batch of its own. An encoder that the model trains is frozen until the "
        "stage with dynamic. null = memory.features throughout.",
    )


@dataclass
class ScheduleConfig:
    """Learning rate over the run; or `_target_` of a scheduler of torch.optim.lr_scheduler, and its arguments."""

    name: ScheduleName = knob(ScheduleName.constant, "constant; cosine or linear fall to min_lr_frac at the last step.")
    warmup_steps: int = knob(0, "Steps of linear warm-up from 0.", at_least=0)
    min_lr_frac: float = knob(
        0.0, "Final learning rate of cosine and linear as a fraction of the first.", at_least=0, at_most=1
    )
    interval: Optional[ScheduleInterval] = knob(
        None,
        "When a scheduler that `_target_` names takes its next step: after each optimizer step, or each epoch; of "
        "ReduceLROnPlateau step = after each validation. null = step for OneCycleLR and CyclicLR, else epoch.",
    )
    monitor: Optional[str] = knob(None, "The figure that ReduceLROnPlateau goes by, as in metrics.csv: val/loss.")

    @property
    def target(self) -> dict[str, Any] | None:
        """`_target_` and its arguments, which lie beside the knobs; None = the schedule is one of ``name``."""
        known = {each.name for each in fields(self)}
        return {key: value for key, value in vars(self).items() if key not in known} or None


@dataclass
class WorkloadConfig:
    """Learning: model, data, optimizer, schedule, effective batch. Everything here changes the result."""

    name: str = knob(MISSING, "Name of the workload; also the folder under paths.log_dir.")
    sample_unit: str = knob("samples", "What one sample is called in figures (triplets, windows, patches).")
    effective_batch_size: Optional[int] = knob(
        None,
        "Samples per optimizer step over all ranks; kept exactly, however it is split. null = the batch size of the "
        "DataLoader that workload.data returns.",
        at_least=1,
    )
    drop_last: bool = knob(False, "Leave out the last, smaller batch of an epoch. Validation never does.")
    eval_batch_size: Optional[int] = knob(
        None, "Samples per batch of validation and test. null = as the data says, else the micro-batch.", at_least=1
    )
    model: Any = knob(MISSING, "`_target_` of an nn.Module and its arguments.")
    data: Any = knob(
        MISSING,
        "`_target_` of a function that returns Datasets, DataLoaders or a LightningDataModule, and its arguments. null "
        "for a LightningModule with loaders of its own.",
    )
    optimizer: Any = knob(
        None, "`_target_` of a torch optimizer and its arguments. null for a LightningModule that brings its own."
    )
    metrics: Any = knob(
        None,
        "Metrics of torchmetrics for validation and test: a `_target_`, a list of them, or a mapping of names to them. "
        "They are given the predictions and targets of the model's LossOutput.",
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    @property
    def samples_per_step(self) -> int:
        """``effective_batch_size``; if it is null, set once the DataLoader is known."""
        assert self.effective_batch_size is not None
        return self.effective_batch_size


@dataclass
class TrainerConfig:
    """How long, and where."""

    max_epochs: Optional[int] = knob(
        None, "Passes over the training data. The first limit reached ends the run.", at_least=1
    )
    max_steps: Optional[int] = knob(None, "Optimizer steps.", at_least=1)
    max_time_s: Optional[float] = knob(None, "Seconds of training.", above=0)
    validate_every_steps: Optional[int] = knob(
        None, "Optimizer steps between validations. null = at the end of each epoch.", at_least=1
    )
    checkpoint_every_steps: Optional[int] = knob(
        None,
        "Optimizer steps between checkpoints. null = at the end of each epoch and by checkpoint_minutes.",
        at_least=1,
    )
    checkpoint_minutes: Optional[float] = knob(
        10.0, "Longest time between checkpoints, minutes. null = no limit.", above=0
    )
    keep_last: int = knob(2, "Latest checkpoints kept; best is kept beside them.", at_least=1)
    log_every_steps: int = knob(50, "Optimizer steps between rows of metrics.csv.", at_least=1)
    gradient_clip: Optional[float] = knob(None, "Largest gradient norm. null = no clipping.", above=0)
    accelerator: Accelerator = knob(Accelerator.auto, "auto, cpu or gpu.")
    devices: int = knob(1, "Devices (ranks) on each machine.", at_least=1)
    num_nodes: int = knob(
        1, "Machines that train together, each with trainer.devices; torchrun or srun must start them.", at_least=1
    )
    strategy: Strategy = knob(Strategy.auto, "auto, ddp or fsdp (CUDA only).")
    on_nan: OnNan = knob(
        OnNan["raise"],
        "A non-finite loss: raise (stop), skip (leave out the step) or halve_lr (leave it out, and halve the rate). "
        "The last two look at gradients too.",
    )
    deterministic: bool = knob(False, "Only deterministic kernels; slower on a GPU.")
    limit_batches: Optional[int] = knob(
        None, "At most so many batches per epoch and per evaluation: a quick look, not a result.", at_least=1
    )
    sanity_batches: int = knob(
        1,
        "Batches of validation and of test run before the first step, so that what is broken there shows at once; they "
        "leave nothing behind. 0 = none.",
        at_least=0,
    )
    overfit_batches: Optional[int] = knob(
        None,
        "Train on the first so many batches of the first epoch again and again, unshuffled: can the model learn?",
        at_least=1,
    )
    profile_steps: Optional[int] = knob(
        None,
        "Steps recorded by torch.profiler after 3 of warm-up, into profile/trace.json of the run folder; the report "
        "has what they spent their time on.",
        at_least=1,
    )
    best_metric: Optional[str] = knob(None, "Validation metric that picks the best checkpoint. null = the workload's.")
    best_mode: Optional[BestMode] = knob(None, "max or min. null = the workload's.")

    @property
    def world_size(self) -> int:
        """Number of ranks: processes that train together, one per device."""
        return self.num_nodes * self.devices

    @property
    def ranks(self) -> str:
        """Overrides that set the number of ranks, as typed."""
        devices = f"trainer.devices={self.devices}"
        return devices if self.num_nodes == 1 else f"trainer.num_nodes={self.num_nodes} x {devices}"

    def with_ranks(self, most: int) -> str:
        """Returns overrides for at most ``most`` ranks, fewer than there are; with fewer machines if that is enough."""
        nodes = min(self.num_nodes, most)
        if (fewer := most // self.devices) * self.devices >= most // nodes * nodes:
            return f"trainer.num_nodes={fewer}"
        devices = f"trainer.devices={most // nodes}"
        return devices if nodes == self.num_nodes else f"trainer.num_nodes={nodes} {devices}"


@dataclass
class TelemetryConfig:
    """Telemetry: whether and how often GPUs and host are read."""

    enabled: bool = knob(True, "Watch the GPUs and this process while training; false also leaves out the ceiling.")
    interval_s: float = knob(
        0.5,
        "Seconds between readings of utilisation, memory and CPU; what changes slowly is read every 5 s. Lower it to "
        "see swings shorter than 5 s; each reading costs a millisecond or two of CPU.",
        at_least=0.1,
        at_most=3600,
    )
    ceiling_steps: int = knob(
        20,
        "Steps run at the end on batches already on the device, to tell how fast the run could be; fewer where they "
        "would take longer than 10 s and 5 % of the time of training; 0 = none.",
        at_least=0,
    )


@dataclass
class LoggerConfig:
    """Where figures go beside the files, which are always written."""

    mode: LoggerMode = knob(
        LoggerMode.disabled, "wandb: auto (online when logged in, else offline), online, offline or disabled."
    )
    tensorboard: bool = knob(False, "TensorBoard: event files in the folder tensorboard/ of the run. Needs the extra.")
    mlflow: bool = knob(False, "mlflow: a run of the experiment logger.project at logger.mlflow_uri. Needs the extra.")
    csv: bool = knob(False, "Lightning's CSVLogger: csv/version_0/metrics.csv of the run, a column a figure.")
    mlflow_uri: Optional[str] = knob(
        None, "Where mlflow keeps runs. null = MLFLOW_TRACKING_URI, or else the folder <log_dir>/mlruns."
    )
    diff: bool = knob(
        True,
        "Write the uncommitted change of the checkout into run.json, secrets masked; false leaves it out.",
    )
    project: str = knob("wellfed", "wandb project; mlflow experiment.")
    entity: Optional[str] = knob(None, "wandb user or team. null = wandb's default.")
    group: Optional[str] = knob(None, "wandb group of this run.")


@dataclass
class SweepConfig:
    """Many short runs to find the fastest settings; an option of this group says which, in hydra.sweeper.params."""

    name: Optional[str] = knob(
        None,
        "Folder of the sweep, <log_dir>/<workload>/sweeps/<name>; the same name goes on with what is missing there. "
        "null = the name of the chosen option.",
    )
    max_trials: int = knob(100, "Largest number of combinations that are run without asking.", at_least=1)
    trial_steps: int = knob(
        200,
        "Optimizer steps measured in a trial at most; it ends sooner where the 95 % interval of samples/s is within "
        "2 %.",
        at_least=10,
    )
    timeout_s: float = knob(
        600,
        "Seconds after which a trial is ended and noted as timeout; preparing data and model may take as long again.",
        above=0,
        at_most=1000000.0,
    )
    objective: SweepObjective = knob(
        SweepObjective.samples_per_s,
        "What ranks the points, and picks those that are measured again: samples_per_s, samples_per_joule (needs GPUs "
        "that NVML reads power or energy of) or peak_memory (the least first). The same command with another one ranks "
        "anew what is measured already.",
    )
    fail_fast: bool = knob(False, "Start no further trial after one that did not end well.")
    retry: list[SweepStatus] = knob([], "Statuses whose trials are run again, e.g. [oom,failed].")


@dataclass
class SearchConfig:
    """Many whole trainings to find what learns best, ranked by `trainer.best_metric`; also of a plain `-m`."""

    name: Optional[str] = knob(
        None,
        "Folder of the search, <log_dir>/<workload>/searches/<name>; the same name goes on with what is missing there. "
        "null = the name of the chosen option, and of a plain -m the time.",
    )
    sampler: SearchSampler = knob(
        SearchSampler.grid,
        "What picks the values of the next trial: grid (every combination), tpe (Optuna's estimator, which learns from "
        "the trials so far) or random. tpe and random need the extra search, and take intervals.",
    )
    pruner: SearchPruner = knob(
        SearchPruner.none,
        "What ends a trial early, asked after each validation: none, median (its best so far is worse than the median "
        "of the others' at that validation; not before the second, and five trials) or asha (successive halving: of "
        "the trials that reach validation 1, 3, 9, ... the best third goes on).",
    )
    max_trials: int = knob(
        100, "Trials in all, those of earlier commands included; of a grid the largest number of points.", at_least=1
    )
    max_minutes: Optional[float] = knob(
        None,
        "Minutes after which this command starts no further trial; those that run go on. null = no limit.",
        above=0,
    )
    timeout_s: Optional[float] = knob(
        None, "Seconds after which a trial is ended and noted as timeout. null = no limit.", above=0, at_most=1000000.0
    )
    seed: int = knob(1, "Seed of the sampler; that of the trainings is seed.", at_least=0, below=2**32)
    retry: list[SweepStatus] = knob([], "Statuses whose trials are run again, e.g. [oom,failed].")


@dataclass
class PathsConfig:
    """Where files are read and written."""

    log_dir: str = knob("logs", "Run folders go to <log_dir>/<workload>/runs/; relative to the working directory.")
    cache_dir: str = knob(".cache", "Caches: <cache_dir>/<kind>/<digest>/; may be deleted at any time.")


@dataclass
class GuardConfig:
    """Packages that a configuration may name as `_target_`."""

    allow_targets: list[str] = knob(
        ["torch", "lightning", "torchmetrics", "wellfed"],
        "Packages that a `_target_` may come from, beside those in src/, your own.",
    )


@dataclass
class RunConfig:
    """One run of `python src/train.py`."""

    seed: int = knob(1, "Seed of everything random.", at_least=0, below=2**63)
    resume: Optional[str] = knob(None, "auto, a run folder or a checkpoint: go on where it stopped.")
    rerun: Optional[str] = knob(None, "A run folder whose overrides are replayed into a new one.")
    gpu: GpuConfig = field(default_factory=GpuConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: Any = knob(
        None,
        "Callbacks of Lightning's or your own, by names that you choose: each `_target_` and its arguments. They are "
        "called in this order, where Lightning calls them.",
    )
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    config: GuardConfig = field(default_factory=GuardConfig)


@dataclass
class TuneConfig:
    """A search for faster settings: how long it may take, and what becomes of what it finds. What it goes by is
    `sweep.objective`; a trial is measured as `sweep.trial_steps` and `sweep.timeout_s` say."""

    name: Optional[str] = knob(
        None,
        "Name of the options that are written, and folder <log_dir>/<workload>/tunes/<name>, where the same command "
        "goes on. null = after workload and card: <workload>_rtx_4090, or <workload>_cpu_8.",
    )
    max_trials: int = knob(20, "Trials at most, that of the start among them; the comparison comes after.", at_least=2)
    max_minutes: float = knob(
        15.0,
        "Minutes, preparing included, after which no further trial is begun. One that has begun may take "
        "sweep.timeout_s, and the comparison comes on top.",
        above=0,
        at_most=100000.0,
    )
    rounds: int = knob(
        5,
        "Trials each of start and result in the comparison at the end, in turn: more of them tell smaller gains from "
        "noise.",
        at_least=3,
    )
    fixed: list[str] = knob([], "Knobs and groups that stay as they are at the start, e.g. [gpu,loader.num_workers].")
    write: TuneWrite = knob(
        TuneWrite.auto,
        "Whether to write what was found as options of loader and memory: auto = if the gain is beyond noise, always, "
        "or never.",
    )
    replace: bool = knob(False, "Write over options of that name which no tune has written; `--force` does the same.")


@dataclass
class TuneRunConfig(RunConfig):
    """One run of `python src/tune.py`: where it starts, and how it searches."""

    tune: TuneConfig = field(default_factory=TuneConfig)


@dataclass
class EvaluateConfig:
    """One run of `python src/evaluate.py`."""

    checkpoint: Optional[str] = knob(
        None,
        "What is evaluated: a checkpoint file, or a run by its folder, its name, a beginning of it, or last; of a run "
        "best.ckpt, else last.ckpt. Its run folder gives the configuration. null = the newest run.",
    )
    accelerator: Accelerator = knob(Accelerator.auto, "auto, cpu or gpu.")
    paths: PathsConfig = field(default_factory=PathsConfig)
