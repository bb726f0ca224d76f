"""Runs an epoch like Lightning's loop, but calls our step directly.

In each step Lightning calls two dozen hooks and half a dozen closures, which do nothing here. On a small network they
take as long as the network. `StepLoop` skips them, and counts as Lightning does. It uses private attributes of
Lightning 2.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from wellfed.data.own_loader import UNKNOWN_LENGTH
from wellfed.observe.timing.wall import VALIDATION, Wall
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.callbacks.users import nobody_logs
from wellfed.train.lightning.hooks import calls_of
from wellfed.train.lightning.module import StepModule


class StepLoop(_TrainingEpochLoop):
    """An epoch of direct steps on one device. With several, Lightning's loop runs, which asks the ranks at each batch.

    Lightning makes the first step after a resume, where it restores its counters.
    """

    _is_direct = False
    _may_validate = True
    _validates = False
    _skip_next_val: bool
    when_over: Callable[[Any], None] | None = None
    """Called with the Trainer after a step within an epoch and its validation."""
    wall = Wall()
    """Account of the wall time of validations; `Clock` sets the run's account."""

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        if self.trainer.num_training_batches == UNKNOWN_LENGTH:
            # The loader marks its last batch. Lightning would read one batch ahead from a loader without length.
            self.trainer.val_check_batch = self.trainer.val_check_batch if self._counts_steps() else float("inf")
            loader = self.trainer.train_dataloader
            parts = self.trainer.accumulate_grad_batches
            loader.on_last = lambda: setattr(data_fetcher, "length", data_fetcher.fetched + parts)
        is_alone = type(self.trainer.strategy) is SingleDeviceStrategy
        self._is_direct = False
        module = self.trainer.lightning_module
        if is_alone and type(module) is StepModule and module.listener is None:
            self._is_direct = not data_fetcher.batches and len(_loaders_of(data_fetcher)) == 1
        self._may_validate = not self._is_direct or self._should_check_val_epoch()

    def _counts_steps(self) -> bool:
        """Returns whether validation follows a number of steps, not the end of an epoch."""
        return self.trainer.check_val_every_n_epoch is None

    @property
    def global_step(self) -> int:
        """Optimizer steps so far. Skips Lightning's check of the mode, since it is read several times a step."""
        if not self._is_direct:
            return int(super().global_step)
        steps: int = self.automatic_optimization.optim_progress.optimizer.step.total.completed
        return steps

    @property
    def done(self) -> bool:
        """Whether the epoch is over. An early end waits for a whole step, whose gradients would be lost."""
        return super().done and not is_within_step(self.trainer)

    def run(self, data_fetcher: Any) -> None:
        """Runs the epoch as Lightning's method does, with direct steps where possible."""
        self.reset()
        self.on_run_start(data_fetcher)
        while not self.done:
            try:
                if self._is_direct and not self._restarting:
                    self._make_steps(data_fetcher)
                else:
                    self.advance(data_fetcher)
                    self.on_advance_end(data_fetcher)
            except StopIteration:
                break
            finally:
                self.on_iteration_done()

    def _make_steps(self, fetcher: Any) -> None:
        """Makes steps until a validation may be due, or the epoch or the training may end.

        Treats each batch as Lightning's `advance` and `on_advance_end` do, in the same order. Counters are set here,
        since a step would call forty of Lightning's methods.
        """
        trainer, progress, results = self.trainer, self.batch_progress, self._results
        logged, signals, module = trainer._logger_connector, trainer._signal_connector, trainer.lightning_module
        plugin, device, configs = trainer.precision_plugin, trainer.strategy.root_device, trainer.lr_scheduler_configs
        step, loader, attributes = module.step, _loaders_of(fetcher)[0], vars(module)
        converts = type(plugin).convert_input is not Precision.convert_input
        moves = device.type != "cpu" or step.passes.needs_weights or "transfer_batch_to_device" in attributes
        begins, ends = (calls_of(trainer.callbacks, hook) for hook in ("on_train_batch_start", "on_train_batch_end"))
        here, counted = progress.current, (progress.total, progress.current)
        optimizer = self.automatic_optimization.optim_progress.optimizer
        stepped, zeroed = ((one.total, one.current) for one in (optimizer.step, optimizer.zero_grad))
        last_step = self.max_steps if self.max_steps >= 0 else math.inf
        left = self._batches_to_validation()
        while True:
            left -= 1
            batch = _next_of(loader, fetcher)
            batch_idx = here.ready
            progress.is_last_batch = is_last = fetcher.done
            if converts:
                batch = plugin.convert_input(batch)
            if moves:
                batch = module.transfer_batch_to_device(batch, device, 0)
            for count in counted:
                count.ready += 1
            logged._first_loop_iter = logged._first_loop_iter is None
            results.batch, results.batch_size, results.dataloader_idx = batch, None, None
            # `module.log` reads the hook's name. Setting it in the dict skips torch's search for a parameter.
            attributes["_current_fx_name"] = "on_train_batch_start"
            for call in begins:
                call(trainer, module, batch, batch_idx)
            attributes["_current_fx_name"] = None
            for count in counted:
                count.started += 1
            for count in stepped:
                count.ready += 1
            output = {"loss": step(batch)}
            for count in zeroed:
                count.ready, count.started, count.completed = count.ready + 1, count.started + 1, count.completed + 1
            for count in stepped:
                count.completed += 1
            for count in counted:
                count.processed += 1
            self._step_schedulers(module.plain, configs)
            attributes["_current_fx_name"] = "on_train_batch_end"
            for call in ends:
                call(trainer, module, output, batch, batch_idx)
            attributes["_current_fx_name"] = None
            if results:  # a callback has logged something
                logged.on_batch_end()
            results.batch = None
            for count in counted:
                count.completed += 1
            if results:
                logged.update_train_step_metrics()
            del batch, output  # frees their device memory while the next batch is fetched
            is_over = is_last or stepped[0].completed >= last_step or trainer.should_stop or signals.received_sigterm
            if is_over or left == 0:
                self.on_advance_end(fetcher)
                return
            self._batches_that_stepped += 1
            if self.when_over is not None:
                self.when_over(trainer)
                if trainer.should_stop:
                    return

    def _step_schedulers(self, plain: Any, configs: Any) -> None:
        """Steps the schedulers of a plain model: our own once a step, a user's as Lightning does."""
        if plain.scheduling is not None:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            return
        progress = self.scheduler_progress
        for config in configs:
            for count in (progress.total, progress.current):
                count.ready += 1
            config.scheduler.step()
            for count in (progress.total, progress.current):
                count.completed += 1

    def _batches_to_validation(self) -> float:
        """Returns the number of batches until a validation may be due, unless the epoch ends before."""
        trainer = self.trainer
        every = trainer.val_check_batch
        if not self._may_validate:
            return math.inf
        if trainer._val_check_time_interval is not None:
            return 1
        if every == math.inf:
            return 1 if isinstance(trainer.limit_train_batches, int) else math.inf
        counted = self.batch_progress.total if self._counts_steps() else self.batch_progress.current
        return float(every - counted.ready % every)

    def _broadcast_sigterm_tensor(self) -> None:
        """Does nothing, since `StopAtStepEnd` stops all ranks. Lightning's broadcast would wait for the device."""

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Returns whether to validate now. Includes the last step if schedulers or callbacks monitor validations."""
        if is_within_step(self.trainer):
            return False
        if super()._should_check_val_fx(data_fetcher):
            return True
        is_over = 0 <= self.max_steps <= self.global_step
        module = self.trainer.lightning_module
        is_monitored = not isinstance(module, StepModule) or module.plain.is_monitored
        return is_over and is_monitored and bool(self._should_check_val_epoch())

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Counts the batch. Calls Lightning's method only for validations, plateaus, accumulation and the end."""
        trainer = self.trainer
        if self._skip_next_val:  # a resume: the checkpoint was written after this step and its validation
            self._skip_next_val = False
            return
        is_plain = self._is_direct and not (self._restarting or trainer.should_stop or trainer.received_sigterm)
        if is_plain and not (self._may_validate and self._should_check_val_fx(data_fetcher)):
            self._batches_that_stepped += 1
        else:
            self._validates = self._should_check_val_fx(data_fetcher)
            with self.wall.during(VALIDATION) if self._validates else nullcontext():
                super().on_advance_end(data_fetcher)
        if self.when_over is not None and not self.batch_progress.is_last_batch:
            self.when_over(trainer)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Steps the schedulers. A plain model's plateau scheduler with interval ``step`` steps after validations."""
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


def _loaders_of(fetcher: Any) -> list[Iterator[Any]]:
    """Returns the iterators of a fetcher of Lightning, one for each loader of the epoch."""
    return fetcher.combined_loader._iterator.iterators  # type: ignore[no-any-return]


def _next_of(batches: Iterator[Any], fetcher: Any) -> Any:
    """Returns the next batch directly, without Lightning's four layers that combine several loaders."""
    try:
        batch = next(batches)
    except StopIteration:
        fetcher.done = True
        raise
    fetcher.fetched += 1
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
    return batch
