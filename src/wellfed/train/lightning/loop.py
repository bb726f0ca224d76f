"""Runs an epoch like Lightning's loop, but calls our step directly.

For each step Lightning calls two dozen hooks and half a dozen closures, which do nothing here. On a small network they
take as long as the network. `StepLoop` skips them and keeps Lightning's counters as Lightning does. It uses private
attributes of Lightning 2.6; where they are missing, Lightning's own loop runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from operator import attrgetter
from typing import Any

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy

from wellfed.data.streams.stream_loader import UNKNOWN_LENGTH
from wellfed.observe.timing.wall import VALIDATION, Wall
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.callbacks.users import nobody_logs
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import as_scheduled

_INSIDES = attrgetter(
    "_restarting",
    "_results.batch",
    "_skip_next_val",
    "_should_check_val_fx",
    "_should_check_val_epoch",
    "trainer.received_sigterm",
    "trainer.lightning_module._current_fx_name",
    "_batches_that_stepped",
    "batch_progress.current.ready",
    "scheduler_progress.increment_completed",
    "automatic_optimization.optim_progress.optimizer_steps",
    "automatic_optimization.optim_progress.optimizer.step.increment_ready",
    "automatic_optimization.optim_progress.optimizer.zero_grad.total.increment_by",
    "trainer._logger_connector.on_batch_start",
    "trainer._logger_connector.on_batch_end",
    "trainer._logger_connector.update_train_step_metrics",
)
"""Private attributes of Lightning that `StepLoop` uses."""


class StepLoop(_TrainingEpochLoop):
    """An epoch of direct steps on one device; with several, Lightning's loop asks the other ranks at each batch.

    The first step after a resume is Lightning's, which restores its counters there.
    """

    _is_direct = False
    _may_validate = True
    _validates = False
    when_over: Callable[[Any], None] | None = None
    """Called with the Trainer once a step within an epoch and its validation are done."""
    wall = Wall()
    """Account of the wall time, for validations; `Clock` sets the one of the run."""

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        if self.trainer.num_training_batches == UNKNOWN_LENGTH:
            # The loader marks its last batch; Lightning would read a loader without length one batch ahead.
            self.trainer.val_check_batch = self.trainer.val_check_batch if self._counts_steps() else float("inf")
            loader = self.trainer.train_dataloader
            parts = self.trainer.accumulate_grad_batches
            loader.on_last = lambda: setattr(data_fetcher, "length", data_fetcher.fetched + parts)
        is_alone = type(self.trainer.strategy) is SingleDeviceStrategy
        self._is_direct = False
        module = self.trainer.lightning_module
        if is_alone and type(module) is StepModule and module.listener is None:
            with suppress(AttributeError):
                _INSIDES(self)
                self._is_direct = True
        self._may_validate = not self._is_direct or self._should_check_val_epoch()

    def _counts_steps(self) -> bool:
        """Returns whether validation comes after a number of steps, not at the end of an epoch."""
        return self.trainer.check_val_every_n_epoch is None

    @property
    def global_step(self) -> int:
        """Optimizer steps so far; read a dozen times a step, so it skips Lightning's check of the mode."""
        progress = self.automatic_optimization.optim_progress
        return int(progress.optimizer_steps if self._is_direct else super().global_step)

    @property
    def done(self) -> bool:
        """True once the epoch is over. An early end waits for a whole step, whose gradients would be lost."""
        return super().done and not is_within_step(self.trainer)

    def advance(self, data_fetcher: Any) -> None:
        """Does what Lightning's method does for one batch, in the same order."""
        if self._restarting or not self._is_direct:
            super().advance(data_fetcher)
            return
        trainer, progress, logged = self.trainer, self.batch_progress, self.trainer._logger_connector
        module: Any = trainer.strategy.lightning_module
        batch, _, _ = next(data_fetcher)
        batch_idx = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
        progress.increment_ready()
        logged.on_batch_start(batch)
        self._call("on_train_batch_start", module, batch, batch_idx)
        progress.increment_started()
        counts = self.automatic_optimization.optim_progress.optimizer
        counts.step.increment_ready()
        output = {"loss": module.step(batch)}
        counts.zero_grad.total.increment_by(1)
        counts.zero_grad.current.increment_by(1)
        counts.step.increment_completed()
        progress.increment_processed()
        if module.plain.scheduling is not None:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        for config in trainer.lr_scheduler_configs if module.plain.scheduling is None else ():  # a factor, once a step
            self.scheduler_progress.increment_ready()
            with as_scheduled(config.scheduler.optimizer):
                config.scheduler.step()
            self.scheduler_progress.increment_completed()
        self._call("on_train_batch_end", module, output, batch, batch_idx)
        if self._results:  # a callback has logged something
            logged.on_batch_end()
        self._results.batch = None
        progress.increment_completed()
        if self._results:
            logged.update_train_step_metrics()

    def _broadcast_sigterm_tensor(self) -> None:
        """Does nothing: `StopAtStepEnd` stops all ranks. Lightning's broadcast at each batch waits for the device."""

    def _call(self, hook: str, module: Any, *arguments: Any) -> None:
        # `module.log` reads the hook's name. Setting it in the dict skips torch's search for a parameter of that name.
        attributes = vars(module)
        attributes["_current_fx_name"] = hook
        for callback in self.trainer.callbacks:
            getattr(callback, hook)(self.trainer, module, *arguments)
        attributes["_current_fx_name"] = None

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Returns whether to validate now; also after the last step, if schedulers or callbacks monitor validations."""
        if is_within_step(self.trainer):
            return False
        if super()._should_check_val_fx(data_fetcher):
            return True
        is_over = 0 <= self.max_steps <= self.global_step
        module = self.trainer.lightning_module
        is_monitored = not isinstance(module, StepModule) or module.plain.is_monitored
        return is_over and is_monitored and bool(self._should_check_val_epoch())

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Counts the batch. Lightning's method is called only for validations, plateaus, accumulation and the end."""
        trainer = self.trainer
        is_plain = self._is_direct and not (self._restarting or trainer.should_stop or trainer.received_sigterm)
        if is_plain and not (self._may_validate and (self._skip_next_val or self._should_check_val_fx(data_fetcher))):
            self._batches_that_stepped += 1
        else:
            self._validates = not self._skip_next_val and self._should_check_val_fx(data_fetcher)
            with self.wall.during(VALIDATION) if self._validates else nullcontext():
                super().on_advance_end(data_fetcher)
        if self.when_over is not None and not self.batch_progress.is_last_batch:
            self.when_over(trainer)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Steps the schedulers; a plateau scheduler of a plain model with interval step only after a validation."""
        is_plateau_of_step = interval == "step" and update_plateau_schedulers
        if not is_plateau_of_step or self._validates or not isinstance(self.trainer.lightning_module, StepModule):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _get_monitor_value(self, key: str) -> Any:
        value, trainer = super()._get_monitor_value(key), self.trainer
        if value is None and any(one.strict and one.monitor == key for one in trainer.lr_scheduler_configs):
            is_ours = isinstance(trainer.lightning_module, StepModule)
            where = "workload.schedule.monitor" if is_ours else "ReduceLROnPlateau: monitor"
            raise nobody_logs(where, key, trainer.callback_metrics)
        return value
