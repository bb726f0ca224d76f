"""Marks the events of each step on the step clock, through the two places where Lightning lets others look: its
`Profiler`, which it calls around each of its actions, and its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import model_helpers

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, WARMUP_STEPS, StepClock
from wellfed.observe.timing.wall import END, EPOCH_END, VALIDATION, Wall, is_within_steps
from wellfed.train.loop.training import Watchers
from wellfed.train.memory.reasons import MemoryGrowth
from wellfed.train.step.loss import Compiled

_FETCH = "train_dataloader_next"
"""Lightning's action of taking the next batch from the loaders."""
_HOOKS = ("on_", "setup", "teardown")
_NOT_OF_STEPS = ("epoch", "validation", "sanity")
"""Parts of the names of hooks that a training without epochs and validations does not call."""
_OURS = "wellfed."


class Watch(PassThroughProfiler):
    """Marks of the clock around each fetch, and times of the user's hooks."""

    trainer: pl.Trainer | None = None
    """Its Trainer; None = it is not made yet."""

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self._clock = clock
        self._known: dict[str, AbstractContextManager[Any]] = {}
        self._is_of_step = False
        """The batch that was asked for begins a step."""
        self.before_fetch: Callable[[pl.Trainer], None] = lambda trainer: None
        """Called between two steps of an epoch, after the validation and the schedulers of the first."""

    def start(self, action_name: str) -> None:
        trainer = self.trainer
        if trainer is None or not action_name.endswith(_FETCH):
            return
        self._is_of_step = not is_within_step(trainer, trainer.fit_loop.batch_idx)
        if self._is_of_step:  # not another part of its batch
            self.before_fetch(trainer)
            self._clock.ask()

    def stop(self, action_name: str) -> None:
        if self.trainer is not None and action_name.endswith(_FETCH) and self._is_of_step:
            self._clock.got()
            latest, epoch = latest_of(self.trainer), self.trainer.current_epoch
            self._clock.copy_begins(epoch, *(() if latest is None else (latest.took, latest.copy_ahead_ms)))

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        found = self._known.get(action_name)
        if found is None:
            found = self._known[action_name] = self._account_of(action_name)
        return found

    def _account_of(self, action: str) -> AbstractContextManager[Any]:
        """Returns the account of a user's hook, such as ``[Callback]Finetuning.on_fit_start``; else nothing."""
        owner, _, hook = action.partition("]")[2].rpartition(".")
        trainer = self.trainer
        if trainer is not None and hook.startswith(_HOOKS) and not hook.endswith("_batch_transfer"):
            for one in (*trainer.callbacks, trainer.lightning_module, trainer.datamodule):
                name = type(one).__name__
                is_users = owner == getattr(one, "state_key", name) and not type(one).__module__.startswith(_OURS)
                if is_users and is_overridden(one, hook):
                    return _UsersHook(self._clock.wall, f"{name}.{hook}")
        return nullcontext()


class _UsersHook(AbstractContextManager[None]):
    """Accounts the time of a hook as ``ClassName.hook``."""

    def __init__(self, wall: Wall, account: str) -> None:
        self._wall, self._account, self._settles = wall, account, not is_within_steps(account)
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        if self._settles:
            self._wall.settle()
        self._before.append(self._wall.switch(self._account))

    def __exit__(self, kind: Any, error: BaseException | None, frames: TracebackType | None) -> None:
        self._wall.back(self._before.pop())


def compile_step(module: Any, mode: str) -> None:
    """Compiles a LightningModule's ``training_step``; its errors get a note that names ``gpu.compile``."""
    compiled = Compiled(module.training_step, mode)

    @wraps(module.training_step)  # Lightning reads its arguments
    def training_step(*arguments: Any, **named: Any) -> Any:
        try:
            return compiled(*arguments, **named)
        finally:
            if compiled.has_compiled:
                compiled.has_compiled, module.was_disturbed = False, True

    module.training_step = training_step


class Together(pl.Callback):
    """Several callbacks without state as one, which calls each hook on those that override it, in order.

    Lightning calls all six hooks of a step on every callback, and most override one or two.
    """

    def __init__(self, callbacks: Sequence[pl.Callback], *, only_steps: bool = False) -> None:
        """``only_steps``: hooks of epochs and validations are not called."""
        for name in vars(pl.Callback):
            is_left_out = only_steps and any(word in name for word in _NOT_OF_STEPS)
            if not name.startswith(_HOOKS) or is_left_out:
                continue
            if calls := [getattr(one, name) for one in callbacks if is_overridden(one, name)]:
                setattr(self, name, calls[0] if len(calls) == 1 else partial(_call, calls))


def _call(calls: Sequence[Callable[..., None]], *arguments: Any, **named: Any) -> None:
    for call in calls:
        call(*arguments, **named)


def is_overridden(owner: Any, method: str) -> bool:
    """Returns whether an object of Lightning overrides a method of its base class, in its class or as an attribute."""
    return bool(model_helpers.is_overridden(method, owner))


def latest_of(trainer: pl.Trainer) -> Delivery | None:
    """Returns the engine's latest delivery, without its batch; None where the user's loaders are read."""
    return getattr(trainer.train_dataloader, "latest", None)


def is_within_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Returns whether more batches of the step follow: ``memory.accumulate`` of them, or fewer at an epoch's end."""
    return bool((batch_idx + 1) % trainer.accumulate_grad_batches) and not trainer.is_last_batch


def samples_of(batch: Batch) -> int:
    """Returns the samples of a batch: its first dimension, or that of its first tensor; 1 without any."""
    try:
        return batches.batch_size(batch)
    except TypeError:
        sizes = [len(tensor) for tensor in batches.tensors(batch) if tensor.ndim]
        return sizes[0] if sizes else 1


class Steps(pl.Callback):
    """Counts, times and shows the steps of a training. It must be the first callback: the others' time is host time."""

    def __init__(self, clock: StepClock, watchers: Watchers, *, warmup_steps: int = WARMUP_STEPS) -> None:
        self._clock, self._watchers, self._warmup_left = clock, watchers, warmup_steps
        self._samples = self._parts = self.largest = 0
        """Samples of all ranks and batches in the step so far; samples of its largest batch on this rank."""
        self._has_begun = self._has_stepped = False
        """A batch has come; an optimizer's step was seen. Without one, its time would count as another phase's."""
        self._account: str | None = None
        """Account before a validation."""
        self.growth = MemoryGrowth(torch.device("cpu"))

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        # DDP broadcasts the weights of rank 0 on another stream (`DDPStrategy._setup_model`), before the first step.
        if module.device.type == "cuda" and trainer.world_size > 1:
            torch.cuda.synchronize(module.device)

    def on_sanity_check_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._watchers.sanity()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.growth = MemoryGrowth(trainer.strategy.root_device)
        self._watchers.begin(trainer.global_step)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._clock.interrupt()
        self._samples = self._parts = self.largest = 0  # a hook may have ended the epoch within a step

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        size, latest = samples_of(batch), latest_of(trainer)
        if not self._parts:
            self._clock.copied()
        self._samples += size * trainer.world_size if latest is None else latest.total
        self.largest, self._parts = max(self.largest, size), self._parts + 1
        if not self._has_begun:
            self._has_begun = True
            self._watchers.on_first_batch(batches.bytes_by_dtype(batch))
        self._begin(FORWARD)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
        self._begin(BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self._begin(OTHER)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._has_stepped = module.automatic_optimization  # by hand, phases are unknown
        self._begin(OPTIMIZER)

    def _begin(self, phase: int) -> None:
        if self._has_stepped:
            self._clock.mark((phase, self._clock.now_s()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_within_step(trainer, batch_idx) or not self._parts:  # a batch that is None has no step
            return
        step, watchers = trainer.global_step, self._watchers
        self.growth.note(step)
        is_warmup = self._warmup_left > 0 or watchers.is_slowed
        if getattr(module, "was_disturbed", False):
            module.was_disturbed, is_warmup = False, True
        is_due = self._clock.end(
            step=step, samples=self._samples, micro_batch=self.largest, num_micro=self._parts, warmup=is_warmup
        )
        self._warmup_left = max(0, self._warmup_left - 1)
        if is_due:
            watchers.take_rows(self._clock.rows())
        if trainer.is_last_batch:
            self._clock.wall.switch(EPOCH_END)
        if watchers.trace is not None:
            watchers.is_slowed = next(watchers.trace, False)
        if watchers.sync_search is not None:
            next(watchers.sync_search, None)
        of_epoch = 1.0 if trainer.is_last_batch else min(1.0, (batch_idx + 1) / trainer.num_training_batches)
        watchers.on_step(step, trainer.current_epoch + of_epoch, self._samples)
        self._samples = self._parts = self.largest = 0
        if watchers.bar is not None:
            watchers.bar.look("training", step)
        trainer.should_stop |= watchers.is_measured is not None and watchers.is_measured(step)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._clock.wall.settle()
        if self._watchers.sync_search is not None and not trainer.sanity_checking:
            self._watchers.sync_search.close()
        self._account = self._clock.wall.switch(VALIDATION)
        self._watchers.progress.enter("validate")

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._watchers.bar is not None and not trainer.sanity_checking:
            self._watchers.bar.look("validating", trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._clock.wall.back(self._account)
        self._watchers.progress.enter("train")
        self._clock.interrupt()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._clock.interrupt()
        self._watchers.on_save()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        self._clock.wall.switch(END)
        self._watchers.take_rows(self._clock.rows(wait=True))
        self._watchers.close()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if trainer.sanity_checking:
            exception.add_note("in the val batches that are tried before training; trainer.sanity_batches=0 tries none")
        self._watchers.close()
