"""Makes Lightning's Trainer: arguments from the plan, and those that ``trainer.lightning`` hands through."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from wellfed.config.build import build
from wellfed.config.faults.explain_refusal import nearest
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault, WellfedError, is_the_users, type_and_line
from wellfed.ranks import COLLECTIVE_TIMEOUT_S
from wellfed.train.guest.checkpoint_io import PlainCheckpointIO
from wellfed.train.guest.marks import Watch
from wellfed.train.guest.sharding import fsdp_strategy
from wellfed.train.loop.place import Place
from wellfed.train.loop.training import Limits

WHERE = "trainer.lightning"
_LIGHTNING = Path(pl.__file__).parent
_KNOBS = {
    "precision": "gpu.precision",
    "benchmark": "gpu.cudnn_benchmark",
    "max_time": "trainer.max_time_s",
    "fast_dev_run": "trainer.max_steps",
    "accumulate_grad_batches": "memory.accumulate",
    "gradient_clip_val": "trainer.gradient_clip",
    "log_every_n_steps": "trainer.log_every_steps",
    "callbacks": "callbacks",
    "logger": "logger",
    "profiler": "trainer.profile_steps",
    "default_root_dir": "paths.log_dir",
    "enable_progress_bar": "logger",
    "enable_checkpointing": "trainer.checkpoint_every_steps",
    "barebones": "telemetry.enabled",
    "num_sanity_val_steps": "trainer.sanity_batches",
    "limit_train_batches": "trainer.limit_batches",
    "limit_val_batches": "trainer.limit_batches",
    "limit_test_batches": "trainer.limit_batches",
    "val_check_interval": "trainer.validate_every_steps",
    "check_val_every_n_epoch": "trainer.validate_every_steps",
}
"""Arguments of the Trainer that a knob of another name sets -> the knob."""
_OPTIONAL = {"trainer.limit_batches", "trainer.overfit_batches", "trainer.validate_every_steps"}
"""Knobs that are null unless typed. Until then, their arguments are handed through."""
_COUNTED = ("limit_train_batches", "overfit_batches", "val_check_interval")
"""Arguments in steps, which Lightning counts in batches, of which ``memory.accumulate`` make a step."""


def argument_faults(config: RunConfig) -> Iterator[Fault]:
    """Yields faults of ``trainer.lightning``: names that Lightning's Trainer lacks, or that a knob sets."""
    known, trainer = inspect.signature(pl.Trainer).parameters, config.trainer
    runs_ddp = trainer.world_size > 1 and trainer.strategy.value != "fsdp"
    knobs = {name: f"trainer.{name}" for name in known if hasattr(trainer, name)} | _KNOBS
    for name, value in (trainer.lightning or {}).items():
        where, knob = f"{WHERE}.{name}", knobs.get(name)
        is_variant = name == "strategy" and runs_ddp and "ddp" in str(value)  # as ddp_find_unused_parameters_true
        if name not in known:
            near = nearest(name, known)
            others = ", ".join(sorted(known.keys() - knobs))
            way_out = f"Set {knobs.get(near, f'{WHERE}.{near}')}." if near else f"Its arguments: {others}."
            yield Fault(where, "Lightning's Trainer has no such argument.", way_out)
        elif knob in _OPTIONAL and getattr(trainer, knob.removeprefix("trainer.")) is None:
            continue
        elif knob and not is_variant:
            yield Fault(f"{where}={value}", f"is what {knob} sets.", f"Leave out {where}, and set {knob} instead.")


def ended_by(limits: Limits, trainer: pl.Trainer) -> str | None:
    """Returns the limit that ended a successful training: a knob with its value, or the name of a callback."""
    if limits.max_steps is not None and trainer.global_step >= limits.max_steps:
        return f"trainer.max_steps={limits.max_steps}"
    if limits.max_epochs is not None and trainer.current_epoch >= limits.max_epochs:
        return f"trainer.max_epochs={limits.max_epochs}"
    for one in trainer.callbacks:
        if isinstance(one, EarlyStopping) and one.stopping_reason_message:
            return f"{type(one).__name__}: {one.stopping_reason_message}"
        if isinstance(one, Timer) and limits.max_time_s is not None and (one.time_remaining() or 0) <= 0:
            return f"trainer.max_time_s={limits.max_time_s:g}"
    return "trainer.should_stop" if trainer.should_stop else None


def make_trainer(
    config: RunConfig,
    where: Place,
    limits: Limits,
    callbacks: Sequence[pl.Callback],
    folder: Path,
    *,
    parts: int,
    watch: Watch,
    validates: bool = True,
    logger: Any = None,
) -> pl.Trainer:
    """Returns a Trainer that trains and evaluates as planned.

    Args:
        parts: batches of a step.
        validates: False: no validation is made, as in a training that is only timed.
        logger: loggers of Lightning; None = nothing is logged.

    Raises:
        ConfigError: an argument of ``trainer.lightning`` can't be built, or Lightning refuses it.
    """
    quiet_lightning()
    asked, every, timeout = config.trainer, limits.validate_every_steps, timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    strategy: Any = where.strategy
    if strategy == "fsdp":
        strategy = fsdp_strategy(timeout)
    elif where.size > 1:
        strategy = DDPStrategy(timeout=timeout)
    named: dict[str, Any] = {
        "accelerator": where.accelerator,
        "devices": where.devices,
        "num_nodes": where.num_nodes,
        "strategy": strategy,
        "precision": where.precision,
        "max_epochs": -1 if limits.max_epochs is None else limits.max_epochs,
        "max_steps": -1 if limits.max_steps is None else limits.max_steps,
        "max_time": None if limits.max_time_s is None else timedelta(seconds=limits.max_time_s),
        "gradient_clip_val": asked.gradient_clip,
        "accumulate_grad_batches": parts,
        "deterministic": where.deterministic or None,
        "log_every_n_steps": asked.log_every_steps,
        "num_sanity_val_steps": asked.sanity_batches,
        **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), asked.limit_batches),
        "val_check_interval": every,
        "check_val_every_n_epoch": 1 if every is None else None,
        "enable_checkpointing": any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks),
        "enable_progress_bar": any(isinstance(one, pl.callbacks.ProgressBar) for one in callbacks),
        "enable_model_summary": False,
        "inference_mode": False,  # as in the validations of a training: a test may need gradients, too
        "default_root_dir": str(folder),
        "profiler": watch,
        "logger": logger or DummyLogger(),
        "callbacks": list(callbacks),
    }
    named |= build(dict(asked.lightning or {}), WHERE)
    named |= {name: parts * named[name] for name in _COUNTED if type(named.get(name)) is int}
    given = named.pop("plugins", None) or []
    plugins = [PlainCheckpointIO(trusted=asked.trusted_checkpoints)]
    plugins += given if isinstance(given, (list, tuple)) else [given]
    if not validates:
        named |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
        named |= {"val_check_interval": None, "check_val_every_n_epoch": 1}
    try:
        watch.trainer = pl.Trainer(plugins=plugins, **named)
    except (TypeError, ValueError, MisconfigurationException) as error:
        problem = f"Lightning's Trainer refuses {dict(asked.lightning or {})}: {str(error).removesuffix('.')}."
        raise ConfigError.of(WHERE, problem, f"Change {WHERE}.*") from error
    return watch.trainer


def quiet_lightning() -> None:
    """Silences Lightning's notes, and warnings that don't apply here."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        "does not have many workers",  # the report says whether workers are worth it
        "is smaller than the logging interval",  # metrics are written at the end of each epoch, even a short one
        "You defined a `validation_step` but have no",  # the ceiling does not validate
        "isinstance\\(treespec, LeafSpec\\)",
        "WeightAveraging callback, but loading a checkpoint outside",  # such a checkpoint has the averaged weights
        "your dataloader is not resumable",  # its place is kept, see `reading.Place`
    ):
        warnings.filterwarnings("ignore", message=f".*{text}.*")


@contextmanager
def explained(checkpoint: Path | None) -> Iterator[None]:
    """Explains what Lightning refuses, and errors of restoring a checkpoint. Errors of the user's code pass.

    Raises:
        WellfedError: Lightning refuses how it is used.
        ConfigError: the checkpoint can't be restored.
    """
    try:
        yield
    except MisconfigurationException as error:
        raise WellfedError(str(error)) from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_own, is_lightnings = any(map(is_the_users, files)), _LIGHTNING in Path(files[-1]).parents
        if is_lightnings and not is_own and type(error) in (TypeError, ValueError, RuntimeError):
            raise WellfedError(str(error).strip()) from error
        if checkpoint is None or is_own or checkpoint_connector.__file__ not in files:
            raise
        problem = f"its state can't be restored ({type_and_line(error)})."
        way_out = "Name another, e.g. last-1.ckpt. HYDRA_FULL_ERROR=1 shows where it failed."
        raise ConfigError.of(str(checkpoint), problem, way_out) from error
