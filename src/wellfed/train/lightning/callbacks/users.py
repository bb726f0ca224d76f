"""Orders the user's callbacks among ours, times their hooks, and names the callback in its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from wellfed.errors import ConfigError, WellfedError, type_and_line
from wellfed.extras import other_lightning
from wellfed.observe.timing.wall import Wall, is_within_steps
from wellfed.train.lightning.callbacks.figures import name_in_metrics
from wellfed.train.lightning.hooks import HOOKS, IN_STEP, Together, hooks_of

_LOG = logging.getLogger(__name__)
_AROUND_STEPS = ("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end")
_OF_STEPS = (*IN_STEP, *_AROUND_STEPS, "on_train_batch_start", "on_train_batch_end")
_STATE = ("state_dict", "load_state_dict")


def fault_of_callback(callback: Any, strategy: str) -> tuple[str, str] | None:
    """Returns problem and advice for an object that can't be a callback; None if it can."""
    name = f"{type(callback).__module__}.{type(callback).__qualname__}"
    if not isinstance(callback, pl.Callback):
        return other_lightning(type(callback), "Callback") or (
            f"{name} is no callback.",
            "Name a class that inherits from lightning.pytorch.Callback.",
        )
    if isinstance(callback, GradientAccumulationScheduler):
        problem = f"{name} changes the samples of a step, which are workload.effective_batch_size."
        return problem, "Set memory.accumulate to sum the gradients of parts of a step."
    if isinstance(callback, StochasticWeightAveraging):
        problem = f"{name} sets the average at the end of training, when the last checkpoint is written and validated."
        return problem, "Set callbacks=ema, whose average is validated and saved."
    if isinstance(callback, OnExceptionCheckpoint):  # Lightning starts from its file, whatever the user asks for
        problem = f"{name} makes each later run start from its file, even without resume."
        return problem, "Leave it out: after an error, the state is saved in checkpoints/last.ckpt, for resume=auto."
    if strategy == "fsdp" and isinstance(callback, WeightAveraging):
        return f"{name} averages whole weights, and fsdp shards them.", "Set trainer.strategy=ddp, or leave it out."
    return None


def is_average_beside_model(callback: pl.Callback) -> bool:
    """Returns whether a callback keeps a second copy of the weights on their device."""
    return isinstance(callback, WeightAveraging) and callback._device is None


def averages_weights(trainer: pl.Trainer) -> bool:
    """Returns whether a callback averages the weights, which may stand in their place in validations and at the end."""
    return any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)


def name_errors(callback: pl.Callback, name: str) -> None:
    """Adds the name of a callback to its later errors. Those of ``on_exception`` are only logged."""
    for hook in hooks_of(callback, (*HOOKS, *_STATE)):
        own = getattr(callback, hook)
        if getattr(own, "func", None) not in (_called, _timed):
            setattr(callback, hook, partial(_called, callback, name, hook, own))


def _called(callback: Any, name: str, hook: str, own: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return own(*arguments, **named)
    except Exception as error:
        if hook == "on_exception":  # the first error is the one to report, and the state is saved after this hook
            _LOG.warning("%s of the callback %s raised %s.", hook, name, type_and_line(error))
            _LOG.info("calling it", exc_info=True)
            return None
        if isinstance(error, WellfedError):
            raise
        logged = arguments[0].callback_metrics if arguments and isinstance(arguments[0], pl.Trainer) else {}
        monitor = getattr(callback, "monitor", None)
        if isinstance(error, (RuntimeError, MisconfigurationException)) and monitor and monitor not in logged:
            raise nobody_logs(f"{name}.monitor", monitor, logged) from error
        error.add_note(f"In {hook} of the callback {name} ({type(callback).__name__}).")
        raise


def time_hooks(callback: pl.Callback, wall: Wall) -> None:
    """Accounts the time of each hook of a callback as ``ClassName.hook`` from now on."""
    for hook in hooks_of(callback):
        own = getattr(callback, hook)
        if getattr(own, "func", None) is _timed:  # wrapped in an earlier pass
            own = own.args[-1]
        setattr(callback, hook, _timed_hook(wall, callback, hook, own))


def timed_hooks_of(module: pl.LightningModule, hooks: Sequence[str], wall: Wall) -> dict[str, Callable[..., Any]]:
    """Returns timed versions of the hooks that a LightningModule overrides, and of its schedulers' steps."""
    owned = {hook: getattr(module, hook) for hook in hooks_of(module, hooks, pl.LightningModule)}
    timed = {hook: wraps(own)(_timed_hook(wall, module, hook, own)) for hook, own in owned.items()}
    step = module.lr_scheduler_step

    @wraps(step)  # Lightning checks whether the module overrides it
    def lr_scheduler_step(scheduler: Any, *metric: Any) -> None:
        _timed(wall, f"{type(scheduler).__name__}.step", False, step, scheduler, *metric)

    return {**timed, "lr_scheduler_step": lr_scheduler_step}


def _timed_hook(wall: Wall, owner: Any, hook: str, own: Callable[..., Any]) -> Callable[..., Any]:
    name = f"{type(owner).__name__}.{hook}"
    return partial(_timed, wall, name, not is_within_steps(name), own)


def _timed(wall: Wall, name: str, settles: bool, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if settles:
        wall.settle()
    before = wall.switch(name)
    try:
        return own(*arguments, **named)
    finally:
        wall.back(before)


def nobody_logs(where: str, monitor: str, logged: Mapping[str, Any]) -> WellfedError:
    """Returns the error for a monitored metric that is not logged."""
    names = ", ".join(sorted(logged)) or "no figures so far"
    meant = next((name for name in logged if name.replace("/", "_") == monitor.replace("/", "_")), None)
    way_out = f"Set {where}={meant}." if meant else f"There are: {names}."
    return WellfedError(f"{where}={monitor}: no figure is called {monitor}. {way_out}")


def steps_only(callbacks: Sequence[pl.Callback]) -> list[pl.Callback]:
    """Returns the callbacks with only the hooks of steps, for a timed training."""
    return [Together(callbacks, only=_OF_STEPS)] if callbacks else []


class Last(pl.Callback):
    """Callbacks that come after those of a LightningModule, which Lightning appends to ours."""

    def __init__(self, callbacks: Sequence[pl.Callback], users: Sequence[pl.Callback], wall: Wall) -> None:
        """``wall`` accounts the time of the user's hooks."""
        self._callbacks, self._users, self._wall = callbacks, users, wall

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        for user in self._users if stage == "fit" else ():
            if user not in trainer.callbacks:
                _LOG.warning(
                    "callbacks: %s gives way to the one that %s.configure_callbacks returns.",
                    type(user).__name__,
                    type(module).__name__,
                )
        for callback in trainer.callbacks:
            if not type(callback).__module__.startswith("wellfed."):
                # The Trainer's callbacks were checked; those of `configure_callbacks` are known only here.
                sharding = "fsdp" if isinstance(trainer.strategy, FSDPStrategy) else ""
                if stage == "fit" and (wrong := fault_of_callback(callback, sharding)):
                    raise ConfigError.of(f"{type(module).__name__}.configure_callbacks", *wrong)
                name_errors(callback, type(callback).__name__)
                time_hooks(callback, self._wall)
            if stage != "fit" and isinstance(callback, WeightAveraging):
                # A checkpoint has the averaged weights, which the callback would replace after training.
                callback._average_model = None
        trainer.callbacks.append(Together(self._callbacks))


def monitored(trainer: pl.Trainer) -> list[tuple[str, Literal["max", "min"]]]:
    """Returns name and direction of the monitored metrics; names as in metrics.csv, without ``val/``."""
    found: list[tuple[Any, Any]] = [
        (one.monitor, one.mode) for one in trainer.callbacks if isinstance(one, (EarlyStopping, Checkpoint))
    ]
    found += [(one.monitor, one.scheduler.mode) for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    named = ((name_in_metrics(monitor, "val"), mode) for monitor, mode in found if monitor)
    return [(name.removeprefix("val/"), mode) for name, mode in named if name.startswith("val/")]
