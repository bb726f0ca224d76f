"""Makes Lightning's Trainer with our callbacks, trains with it, and loads weights from a checkpoint."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar, Timer
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import checkpoint_connector

from wellfed.errors import ConfigError, is_the_users, type_and_line
from wellfed.observe.timing.step_clock import StepClock
from wellfed.ranks import COLLECTIVE_TIMEOUT_S
from wellfed.train.checkpoint_values import load
from wellfed.train.guest.checkpoint_io import PlainCheckpointIO
from wellfed.train.lightning.checkpoints.resume_position import ExactResume, GoOn
from wellfed.train.lightning.hooks import Together, overrides
from wellfed.train.lightning.loop import StepLoop

# Each Trainer looks for packages with callbacks, which reads the metadata of all packages.
registry.entry_points = cache(registry.entry_points)


@dataclass(frozen=True)
class TrainerOptions:
    """Options of a Trainer: how long, where, in which precision."""

    accelerator: Literal["cpu", "gpu"]
    devices: int
    strategy: Literal["auto", "ddp", "fsdp"]
    precision: str
    max_epochs: int | None
    max_steps: int | None
    max_time_s: float | None
    gradient_clip: float | None
    validate_every_steps: int | None
    deterministic: bool
    num_nodes: int = 1
    trusted_checkpoints: bool = False
    """Whether checkpoints may hold pickled objects."""
    accumulate: int = 1
    """Number of parts of a step's batch for a user's LightningModule."""

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each device."""
        return self.num_nodes * self.devices


def make_trainer(options: TrainerOptions, callbacks: Sequence[pl.Callback], folder: Path, **more: Any) -> pl.Trainer:
    """Returns a Trainer whose callbacks alone log, save and show.

    ``users`` are the user's callbacks, which come after ours. ``more`` are other arguments for Lightning.
    """
    quiet_lightning()
    users = more.pop("users", ())
    strategy: Any = options.strategy
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if strategy == "fsdp":
        from wellfed.train.lightning.sharding import fsdp_strategy

        strategy = fsdp_strategy(timeout)
    elif options.world_size > 1:
        strategy = DDPStrategy(timeout=timeout)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy,
        precision=options.precision,
        max_epochs=-1 if options.max_epochs is None else options.max_epochs,
        max_steps=-1 if options.max_steps is None else options.max_steps,
        max_time=None if options.max_time_s is None else timedelta(seconds=options.max_time_s),
        gradient_clip_val=options.gradient_clip,
        check_val_every_n_epoch=None if options.validate_every_steps else 1,
        val_check_interval=options.validate_every_steps and options.validate_every_steps * options.accumulate,
        accumulate_grad_batches=options.accumulate,
        deterministic=options.deterministic or None,
        callbacks=[Together([Settled(), ExactResume(), *callbacks]), *users],
        profiler=NoProfiler(),
        default_root_dir=str(folder),
        use_distributed_sampler=False,
        num_sanity_val_steps=more.pop("num_sanity_val_steps", 0),
        logger=more.pop("logger", False),
        enable_checkpointing=any(isinstance(user, Checkpoint) for user in users),
        enable_progress_bar=any(isinstance(user, ProgressBar) for user in users),
        enable_model_summary=False,
        plugins=more.pop("plugins", [PlainCheckpointIO(trusted=options.trusted_checkpoints)]),
        **more,
    )
    lightnings = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = StepLoop(trainer, lightnings.min_steps, lightnings.max_steps)
    return trainer


def before_forks() -> None:
    """Looks for packages that each Trainer looks for, before processes are forked."""
    registry.entry_points(group="lightning.pytorch.callbacks_factory")


class NoProfiler(PassThroughProfiler):
    """A profiler without cost. Lightning's own enters a generator around each hook, dozens of times a step."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        return self._nothing


class Settled(pl.Callback):
    """Wait for the device before training.

    Lightning wraps a model in DDP on a separate stream (`DDPStrategy._setup_model`), where DDP broadcasts the weights
    of rank 0. Without the wait, the first step could start on another stream before the broadcast ends.
    """

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda" and trainer.world_size > 1:
            torch.cuda.synchronize(device)


def quiet_lightning() -> None:
    """Silences Lightning's notes, and warnings that don't apply here."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        if (logger := logging.getLogger(name)).level != logging.WARNING:  # setting it empties a cache of all loggers
            logger.setLevel(logging.WARNING)
    # The inline loader needs no workers.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory.*exists and is not empty.*")
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\).*before.*optimizer.step.*")
    # Metrics are written at the end of each epoch, even a short one.
    warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
    # The ceiling does not validate; frozen encoders stay in eval mode; torch deprecates a class.
    warnings.filterwarnings("ignore", message=".*You defined a `validation_step` but have no.*")
    warnings.filterwarnings("ignore", message=".*module\\(s\\) in eval mode at the start of training.*")
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    # Such a checkpoint has the averaged weights.
    warnings.filterwarnings("ignore", message=".*WeightAveraging callback, but loading a checkpoint outside.*")


def total_steps(options: TrainerOptions, steps_per_epoch: int | None) -> int | None:
    """Returns the optimizer steps of the whole run; None if only time limits it or epochs have no length."""
    known = None not in (options.max_epochs, steps_per_epoch)
    of_epochs = options.max_epochs * steps_per_epoch if known else None  # type: ignore[operator]
    return min((limit for limit in (of_epochs, options.max_steps) if limit is not None), default=None)


def ended_by(trainer: pl.Trainer, options: TrainerOptions) -> str | None:
    """Returns the limit that ended a successful training: a knob with its value, or the name of a callback."""
    if options.max_steps is not None and trainer.global_step >= options.max_steps:
        return f"trainer.max_steps={options.max_steps}"
    if options.max_epochs is not None and trainer.current_epoch >= options.max_epochs:
        return f"trainer.max_epochs={options.max_epochs}"
    for one in trainer.callbacks:
        if isinstance(one, EarlyStopping) and one.stopping_reason_message:
            reason = str(one.stopping_reason_message).removesuffix(" Signaling Trainer to stop.")
            return f"{type(one).__name__}: {reason}"
    timers = [one for one in trainer.callbacks if isinstance(one, Timer)]
    if options.max_time_s is not None and any((one.time_remaining() or 0) <= 0 for one in timers):
        return f"trainer.max_time_s={options.max_time_s:g}"
    return None


def clock_of(device: torch.device, **settings: Any) -> StepClock:
    """Returns a clock of steps, with events on a GPU. ``settings`` are those of `StepClock`."""
    if device.type == "cuda":
        settings["new_event"] = partial(torch.cuda.Event, enable_timing=True)
        settings["current_stream"] = torch.cuda.current_stream
    return StepClock(**settings)


def fit(trainer: pl.Trainer, module: pl.LightningModule, loader: Any, val_loader: Any, checkpoint: Path | None) -> None:
    """Trains, from a checkpoint if one is given, which `PlainCheckpointIO` reads."""
    if checkpoint is not None:
        trainer.callbacks.append(GoOn(loader))
    with restored_from(checkpoint):
        trainer.fit(module, loader, val_loader, ckpt_path=checkpoint, weights_only=True if checkpoint else None)


@contextmanager
def restored_from(checkpoint: Path | None) -> Iterator[None]:
    """Raises a ConfigError instead of an error of restoring a checkpoint. Errors of the user's code pass."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        called = {
            (frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)
        }
        restores = any(file == checkpoint_connector.__file__ and "restore" in name for file, name in called)
        if checkpoint is None or not restores or any(is_the_users(file) for file, _ in called):
            raise
        problem = f"its state can't be restored ({type_and_line(error)})."
        way_out = "Name another, e.g. last-1.ckpt. HYDRA_FULL_ERROR=1 shows where it failed."
        raise ConfigError.of(str(checkpoint), problem, way_out) from error


def has_step(module: pl.LightningModule, split: str) -> bool:
    """Returns whether a user's LightningModule evaluates this split."""
    return overrides(module, {"val": "validation_step", "test": "test_step"}[split])


def misfits(module: pl.LightningModule, state_dict: Mapping[str, Any]) -> list[str]:
    """Returns up to three weights that differ between checkpoint and module, with both shapes."""
    # A module's extra state may be of any type.
    own = {name: tuple(getattr(value, "shape", ())) for name, value in module.state_dict().items()}
    other = {name: tuple(getattr(value, "shape", ())) for name, value in state_dict.items()}
    names = [name for name in own | other if own.get(name) != other.get(name)]
    return [f"{name}: {other.get(name, 'absent')} there, {own.get(name, 'absent')} here" for name in names[:3]]


def load_weights(module: pl.LightningModule, checkpoint: Path, *, trusted: bool = False) -> None:
    """Copies the weights of a checkpoint to the module."""
    module.load_state_dict(load(checkpoint, trusted=trusted)["state_dict"])


def meeting_place(by: Literal["torchrun", "srun", "Lightning"]) -> tuple[str, int]:
    """Returns host and port of rank 0's store; sets ``MASTER_ADDR`` and ``MASTER_PORT`` under Slurm."""
    environment = TorchElasticEnvironment() if by == "torchrun" else SLURMEnvironment()
    return environment.main_address, environment.main_port
