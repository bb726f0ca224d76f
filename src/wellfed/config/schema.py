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

# OmegaConf reads these annotations at run time and accepts Optional[X], not X | None; knob() makes a field().
# ruff: noqa: RUF009, UP045


def knob(text: str, default: Any = None, **limits: float) -> Any:
    """Returns a field of a group: its text for users, its default, and the `Range` of its numbers."""
    metadata = {"text": text, "range": Range(**limits) if limits else None}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


# Allowed names of knobs with a choice; a mapping if mypy must know the values too.
Precision = StrEnum("Precision", ["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"])
Compile = StrEnum("Compile", ["none", "default", "reduce-overhead", "max-autotune"])
Allocator = StrEnum("Allocator", ["default", "expandable"])
Backend = StrEnum("Backend", ["auto", "torch", "inline", "threads", "processes", "own"])
FeatureMode = StrEnum("FeatureMode", ["cache", "cache_host", "dynamic"])
OnOom = StrEnum("OnOom", ["retry", "fail"])
OnNan = StrEnum("OnNan", {"raise": "raise", "skip": "skip"})
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
        "GPU memory budget in GiB. null = what the profile or, with gpu=auto, the card gives. Lower it to rehearse a "
        "smaller card.",
        above=0,
    )
    precision: Precision = knob(
        "auto, 32-true, bf16-mixed, 16-mixed or bf16-true. auto: bf16-mixed from capability 8.0, 16-mixed at 7.x "
        "with tensor cores, else (on a CPU, and for a LightningModule) 32-true. The least capable of several cards "
        "decides. Only a precision typed here is refused where the device can't do it.",
        Precision["auto"],
    )
    tf32: bool = knob(
        "Let float32 matrix products and convolutions use TF32 on CUDA. Turn off where 1e-3 relative error matters.",
        True,
    )
    channels_last: bool = knob(
        "Keep image tensors in NHWC memory order. Faster convolutions with AMP; no use without convolutions.", False
    )
    cudnn_benchmark: bool = knob("Let cuDNN time its algorithms for each new shape. For fixed shapes only.", False)
    compile: Compile = knob(
        "torch.compile: none, or its mode: default, reduce-overhead or max-autotune. Costs seconds to minutes at the "
        "start. A compile that fails ends the run.",
        Compile.none,
    )
    enforce: Optional[bool] = knob(
        "Hold the run to the budget. null = true for a named budget that the card can hold, else false. No effect on a "
        "CPU.",
    )
    allocator: Allocator = knob(
        "default or expandable (segments that grow: less fragmentation when shapes vary).", Allocator.default
    )


@dataclass
class LoaderConfig:
    """Loading of batches, from disk to device."""

    backend: Backend = knob(
        "auto, torch (DataLoader over `__getitem__` with default collate), inline (in the training process), threads, "
        "processes, or own (a DataLoader that workload.data returns, as it came: auto takes it, too).",
        Backend.auto,
    )
    num_workers: Optional[int] = knob(
        "Workers (threads or processes). null = from the CPU quota, or a DataLoader's own. 0 belongs to inline and "
        "torch.",
        at_least=0,
    )
    prefetch_factor: Optional[int] = knob(
        "Batches each worker keeps ready; costs host memory. Needs num_workers >= 1.", at_least=1
    )
    device_prefetch: Optional[int] = knob(
        "Batches copied to the GPU ahead of the step, besides the one in use. null = planned; 0 on a CPU.",
        at_least=0,
    )
    timeout_s: Optional[int] = knob(
        "Seconds to wait for one batch before the loader counts as stuck; 0 = no limit.", at_least=0
    )
    persistent_workers: Optional[bool] = knob(
        "Keep worker processes from one epoch to the next. null = true with worker processes."
    )
    pin_memory: Optional[bool] = knob(
        "Batches in page-locked host memory, so that copies overlap. null = on CUDA only."
    )
    skip_ids: list[int] = knob("Indices of training samples to skip, such as known bad ones.", [], at_least=0)
    max_skipped: int = knob(
        "Failing samples to leave out, if the data have no `fetch`, each with a warning; one more stops the run.",
        0,
        at_least=0,
    )


@dataclass
class MemoryConfig:
    """GPU memory: features, micro-batches, checkpointing, out-of-memory errors."""

    features: Optional[FeatureMode] = knob(
        "cache (GPU), cache_host (RAM) or dynamic (computed per batch). null = the fastest that fits. Only dynamic "
        "can train an encoder.",
    )
    micro_batch: Optional[int] = knob(
        "Samples per forward pass and device. null = planned. At most one of micro_batch and accumulate is set.",
        at_least=1,
    )
    accumulate: Optional[int] = knob("Forward passes per optimizer step. null = derived from micro_batch.", at_least=1)
    checkpoint_activations: Optional[bool] = knob(
        "Recompute activations in the backward pass: less memory, about a third more compute. null = false."
    )
    on_oom: OnOom = knob("retry (halve the micro-batch and do the same batch again) or fail.", OnOom.retry)


@dataclass
class ScheduleConfig:
    """Learning rate over the run; or `_target_` of a scheduler of torch.optim.lr_scheduler, and its arguments."""

    name: ScheduleName = knob("constant; cosine or linear fall to min_lr_frac at the last step.", ScheduleName.constant)
    warmup_steps: int = knob("Steps of linear warm-up from 0.", 0, at_least=0)
    min_lr_frac: float = knob(
        "Final learning rate of cosine and linear as a fraction of the first.", 0.0, at_least=0, at_most=1
    )
    interval: Optional[ScheduleInterval] = knob(
        "When the scheduler of `_target_` takes its next step: after each optimizer step, or each epoch. For "
        "ReduceLROnPlateau, step = after each validation. null = step for OneCycleLR and CyclicLR, else epoch.",
    )
    monitor: Optional[str] = knob("Metric for ReduceLROnPlateau, as in metrics.csv: val/loss.")

    @property
    def target(self) -> dict[str, Any] | None:
        """`_target_` and its arguments, next to the knobs; None = the schedule is one of ``name``."""
        known = {each.name for each in fields(self)}
        return {key: value for key, value in vars(self).items() if key not in known} or None


@dataclass
class WorkloadConfig:
    """Learning: model, data, optimizer, schedule, effective batch. Everything here changes the result."""

    name: str = knob("Name of the workload; also the folder under paths.log_dir.", MISSING)
    sample_unit: str = knob("Name of a sample in figures (triplets, windows, patches).", "samples")
    effective_batch_size: Optional[int] = knob(
        "Samples per optimizer step over all ranks; kept exactly, whatever the micro-batch. null = the batch size of "
        "the DataLoader that workload.data returns.",
        at_least=1,
    )
    drop_last: bool = knob("Leave out the last, smaller batch of an epoch. Validation keeps it.", False)
    eval_batch_size: Optional[int] = knob(
        "Samples per batch of validation and test. null = the data's own, else the micro-batch.", at_least=1
    )
    model: Any = knob("`_target_` of an nn.Module and its arguments.", MISSING)
    data: Any = knob(
        "`_target_` of a function that returns Datasets, DataLoaders or a LightningDataModule, and its arguments. "
        "null for a LightningModule with its own loaders.",
        MISSING,
    )
    optimizer: Any = knob("`_target_` of a torch optimizer and its arguments. null for a LightningModule with its own.")
    metrics: Any = knob(
        "Metrics of torchmetrics for validation and test: a `_target_`, a list of them, or a mapping of names to "
        "them. They get the predictions and targets of the model's LossOutput.",
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    @property
    def samples_per_step(self) -> int:
        """``effective_batch_size``; if it is null, set once the DataLoader is known."""
        assert self.effective_batch_size is not None
        return self.effective_batch_size


@dataclass
class TrainerConfig:
    """Length of a run, validation, checkpoints, devices."""

    max_epochs: Optional[int] = knob("Passes over the training data. The first limit reached ends the run.", at_least=1)
    max_steps: Optional[int] = knob("Optimizer steps.", at_least=1)
    max_time_s: Optional[float] = knob("Seconds of training.", above=0)
    validate_every_steps: Optional[int] = knob(
        "Optimizer steps between validations, or batches if a LightningModule steps by hand. null = at the end of each "
        "epoch.",
        at_least=1,
    )
    checkpoint_every_steps: Optional[int] = knob(
        "Optimizer steps between checkpoints. null = at the end of each epoch and by checkpoint_minutes.",
        at_least=1,
    )
    checkpoint_minutes: Optional[float] = knob(
        "Longest time between checkpoints, minutes. null = no limit.", 10.0, above=0
    )
    keep_last: int = knob("Latest checkpoints kept, in addition to the best.", 2, at_least=1)
    trusted_checkpoints: bool = knob(
        "Checkpoints are pickled and read as Lightning does, with objects of any class. Reading one runs code that the "
        "file names, so set it only for files that you trust. false = plain values, tensors and arrays alone.",
        False,
    )
    log_every_steps: int = knob("Optimizer steps between rows of metrics.csv.", 50, at_least=1)
    gradient_clip: Optional[float] = knob("Largest gradient norm. null = no clipping.", above=0)
    accelerator: Accelerator = knob("auto, cpu or gpu.", Accelerator.auto)
    devices: int = knob("Devices (ranks) on each machine.", 1, at_least=1)
    num_nodes: int = knob(
        "Machines that train together, each with trainer.devices; torchrun or srun must start them.", 1, at_least=1
    )
    strategy: Strategy = knob("auto, ddp or fsdp (CUDA only).", Strategy.auto)
    on_nan: OnNan = knob(
        "A non-finite loss: raise (stop) or skip (leave out the step, also one with non-finite gradients).",
        OnNan["raise"],
    )
    deterministic: bool = knob("Only deterministic kernels; slower on a GPU.", False)
    limit_batches: Optional[int] = knob(
        "Maximum number of batches per epoch and per evaluation: a quick check, not a result.", at_least=1
    )
    sanity_batches: int = knob(
        "Batches of validation and of test run before the first step, so that faults there show at once; they leave "
        "no trace. 0 = none.",
        1,
        at_least=0,
    )
    overfit_batches: Optional[int] = knob(
        "Train repeatedly on this number of first batches of the first epoch, unshuffled: can the model learn?",
        at_least=1,
    )
    profile_steps: Optional[int] = knob(
        "Steps recorded by torch.profiler after 3 of warm-up, into profile/trace.json of the run folder; the report "
        "shows their costliest operations.",
        at_least=1,
    )
    best_metric: Optional[str] = knob("Validation metric that selects the best checkpoint. null = the workload's.")
    best_mode: Optional[BestMode] = knob("max or min. null = the workload's.")
    lightning: Any = knob(
        "Other arguments of Lightning's Trainer, for a LightningModule: {inference_mode: false, "
        "reload_dataloaders_every_n_epochs: 1}.",
        {},
    )

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
        """Returns overrides for at most ``most`` ranks, on one machine."""
        devices = f"trainer.devices={min(most, self.devices)}"
        return devices if self.num_nodes == 1 else f"trainer.num_nodes=1 {devices}"


@dataclass
class TelemetryConfig:
    """Telemetry: whether and how often GPUs and host are read."""

    enabled: bool = knob("Watch the GPUs and this process while training; false also leaves out the ceiling.", True)
    interval_s: float = knob(
        "Seconds between readings of utilisation, memory and CPU; slow metrics are read every 5 s. Lower it to see "
        "swings shorter than 5 s; each reading costs a millisecond or two of CPU.",
        0.5,
        at_least=0.1,
        at_most=3600,
    )
    ceiling_steps: int = knob(
        "Steps run at the end on batches already on the device, to measure how fast the run could be. Fewer if they "
        "would take longer than 10 s, or than 5 % of the training time if that is more; 0 = none.",
        20,
        at_least=0,
    )


@dataclass
class LoggerConfig:
    """Loggers for figures, in addition to the files, which are always written."""

    mode: LoggerMode = knob(
        "wandb: auto (online when logged in, else offline), online, offline or disabled.", LoggerMode.disabled
    )
    tensorboard: bool = knob("TensorBoard: event files in the folder tensorboard/ of the run. Needs the extra.", False)
    mlflow: bool = knob("mlflow: a run of the experiment logger.project at logger.mlflow_uri. Needs the extra.", False)
    csv: bool = knob("Lightning's CSVLogger: csv/version_0/metrics.csv of the run, a column per figure.", False)
    mlflow_uri: Optional[str] = knob(
        "URI where mlflow keeps runs. null = MLFLOW_TRACKING_URI, else the folder <log_dir>/mlruns."
    )
    project: str = knob("wandb project; mlflow experiment.", "wellfed")
    entity: Optional[str] = knob("wandb user or team. null = wandb's default.")
    group: Optional[str] = knob("wandb group of this run.")
    name: Optional[str] = knob("Name of the run in wandb and mlflow. null = the name of its folder.")
    tags: list[str] = knob("Tags of the run in wandb and mlflow, e.g. [baseline,paper].", [])


@dataclass
class SweepConfig:
    """Many short runs to find the fastest settings; hydra.sweeper.params in an option of this group lists them."""

    name: Optional[str] = knob(
        "Folder of the sweep, <log_dir>/<workload>/sweeps/<name>; the same name runs what is missing there. null = "
        "the name of the chosen option.",
    )
    max_trials: int = knob("Maximum number of combinations in a sweep.", 100, at_least=1)
    trial_steps: int = knob(
        "Maximum number of measured optimizer steps per trial. It ends earlier once the 95 % interval of samples/s is "
        "within 2 %.",
        200,
        at_least=10,
    )
    timeout_s: float = knob(
        "Seconds after which a trial is ended and noted as timeout; preparing data and model may take as long again.",
        600,
        above=0,
        at_most=1000000.0,
    )
    objective: SweepObjective = knob(
        "Ranking of the points, which also selects points to measure again: samples_per_s, samples_per_joule (needs "
        "GPUs whose power or energy NVML reads) or peak_memory (lowest first). The same command with another "
        "objective ranks existing measurements.",
        SweepObjective.samples_per_s,
    )
    fail_fast: bool = knob("Start no further trial after one that did not end well.", False)
    retry: list[SweepStatus] = knob("Statuses whose trials are run again, e.g. [oom,failed].", [])


@dataclass
class SearchConfig:
    """Many whole trainings to find what learns best, ranked by `trainer.best_metric`; also of a plain `-m`."""

    name: Optional[str] = knob(
        "Folder of the search, <log_dir>/<workload>/searches/<name>; the same name runs what is missing there. null = "
        "the name of the chosen option, or the time for a plain -m.",
    )
    sampler: SearchSampler = knob(
        "How the values of the next trial are chosen: grid (every combination), random, or tpe (Optuna's estimator, "
        "which learns from the trials so far). Both random and tpe need the extra search, and take intervals.",
        SearchSampler.grid,
    )
    pruner: SearchPruner = knob(
        "Rule that ends a trial early, applied after each validation: none, median or asha. With median, "
        "its best so far is worse than the others' median at that validation, from the second validation and five "
        "trials on. With asha (successive halving), the best third of trials at validation 1, 3, 9, ... continues.",
        SearchPruner.none,
    )
    max_trials: int = knob(
        "Trials in all, including earlier commands; for a grid the maximum number of points.", 100, at_least=1
    )
    max_minutes: Optional[float] = knob(
        "Minutes after which this command starts no further trial; those that run go on. null = no limit.",
        above=0,
    )
    timeout_s: Optional[float] = knob(
        "Seconds after which a trial is ended and noted as timeout. null = no limit.", above=0, at_most=1000000.0
    )
    seed: int = knob("Seed of the sampler; `seed` is for training.", 1, at_least=0, below=2**32)
    retry: list[SweepStatus] = knob("Statuses whose trials are run again, e.g. [oom,failed].", [])


RUN_FOLDER = "<run folder>"
"""Value of ``${hydra:runtime.output_dir}`` until the run has its folder; `Composed.in_folder` replaces it."""


@dataclass
class PathsConfig:
    """Where files are read and written."""

    log_dir: str = knob("Run folders go to <log_dir>/<workload>/runs/; relative to the working directory.", "logs")
    cache_dir: str = knob("Caches: <cache_dir>/<kind>/<digest>/; may be deleted at any time.", ".cache")
    output_dir: str = knob("The run's folder, for other values to refer to; hydra.run.dir sets it.", RUN_FOLDER)


@dataclass
class RunConfig:
    """One run of `python src/train.py`."""

    seed: int = knob("Seed of everything random.", 1, at_least=0, below=2**63)
    resume: Optional[str] = knob("auto, a run folder or a checkpoint: continue where it stopped.")
    rerun: Optional[str] = knob("A run folder whose overrides are replayed into a new one.")
    gpu: GpuConfig = field(default_factory=GpuConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: Any = knob(
        "Callbacks (Lightning's or your own) by names that you choose, each a `_target_` and its arguments. They are "
        "called in this order, where Lightning calls them.",
    )
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class TuneConfig:
    """A search for faster settings: its length, and the use of its result. It ranks by samples/s;
    `sweep.trial_steps` and `sweep.timeout_s` apply to its trials."""

    name: Optional[str] = knob(
        "Name of the written experiment, and of <log_dir>/<workload>/tunes/<name>, where the same command continues. "
        "null = from workload and card: <workload>_rtx_4090, or <workload>_cpu_8.",
    )
    max_trials: int = knob("Maximum number of trials including the start; the comparison comes after.", 20, at_least=2)
    max_minutes: float = knob(
        "Minutes, including preparation, after which no further trial starts. A running one may take sweep.timeout_s, "
        "and the comparison comes after.",
        15.0,
        above=0,
        at_most=100000.0,
    )
    rounds: int = knob(
        "Trials of start and result each in the final comparison, in turns; more trials detect smaller gains.",
        5,
        at_least=3,
    )
    write: TuneWrite = knob(
        "Whether to write the result as an option of experiment: auto = if the gain is beyond noise, always, or never.",
        TuneWrite.auto,
    )
    replace: bool = knob(
        "Overwrite an experiment of that name that no tune has written; `--force` does the same.", False
    )


@dataclass
class TuneRunConfig(RunConfig):
    """One run of `python src/tune.py`: the configuration to start from, and the search."""

    tune: TuneConfig = field(default_factory=TuneConfig)


@dataclass
class EvaluateConfig:
    """One run of `python src/evaluate.py`."""

    checkpoint: Optional[str] = knob(
        "A checkpoint file, or a run by its folder, name, prefix of the name, or last; for a run best.ckpt, else "
        "last.ckpt. Its run folder has the configuration. null = the newest run.",
    )
    accelerator: Accelerator = knob("auto, cpu or gpu.", Accelerator.auto)
    paths: PathsConfig = field(default_factory=PathsConfig)
