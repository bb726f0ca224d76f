"""Trains the user's own LightningModule, which runs its own step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellfed.config.schema import OnOom
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.ranks import largest_share
from wellfed.run.passes.learner import Learner
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import BareBatches
from wellfed.train.lightning.callbacks.users import timed_hooks_of
from wellfed.train.lightning.ceiling import HOOKS, steps_alone
from wellfed.train.lightning.checkpoints.checkpoints import Checkpoints
from wellfed.train.lightning.hooks import replaced
from wellfed.train.lightning.user_module import additions
from wellfed.train.lightning.user_module.additions import SchedulersOfParts, weighing_parts
from wellfed.train.memory import breakdown
from wellfed.train.memory.oom import MemoryFailure
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.loss_faults import add_context_of_module
from wellfed.train.step.micro_batches import Preparation
from wellfed.units import counted


@dataclass
class ModuleLearner(Learner):
    """A LightningModule of the user's own."""

    def __post_init__(self) -> None:
        self.module = self.objects.model
        event, mode = self.books.journal.event, self.plan.device.compile
        if mode != "none":
            additions.compile_step(self.module, mode, lambda message: event("compile_failed", message=message))

    def training(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], *, is_timed: bool = False
    ) -> Any:
        """Returns a Trainer with the additional callbacks that a LightningModule needs."""
        trainer, event = self.config.trainer, self.books.journal.event
        more = [SchedulersOfParts()] if options.accumulate > 1 else []
        non_finite = additions.NonFinite(trainer.on_nan.value, every=trainer.log_every_steps, on_event=event)
        for checkpoints in last:
            if isinstance(checkpoints, Checkpoints):
                checkpoints.best_by_monitor = trainer.best_metric is None
        return super().training(options, [*callbacks, *more, non_finite], last, is_timed=is_timed)

    def fit(self, trainer: Any, loader: Any, val_batches: Any, checkpoint: Path | None) -> None:
        """Trains. A step that runs out of memory is not repeated, since the module's code may have changed its state.

        Raises:
            RestartNeeded: training can resume from the last checkpoint in smaller parts.
            OutOfMemoryExhausted: no smaller parts are left.
        """
        memory = additions.StepMemory()
        trainer.callbacks.append(memory)
        instead = {"training_step": weighing_parts(trainer)} if self.options.accumulate > 1 else {}
        try:
            with replaced(trainer.strategy, instead):
                super().fit(trainer, loader, val_batches, checkpoint)
            return
        except Exception as error:
            if memory.failure is None or not self._may_restart:
                add_context_of_module(error, self.module)
                raise
        # Raised outside of the handler: the handled error refers to all tensors of the step.
        raise self._with_less(memory.failure, memory.samples, trainer)

    def _timed_hooks(self) -> dict[str, Any]:
        """Returns the user's hooks, timed, without those that move a batch: they are part of the step."""
        hooks = [hook for hook in HOOKS if not hook.endswith("_batch_transfer")]
        return timed_hooks_of(self.module, hooks, self.books.wall)

    @property
    def _may_restart(self) -> bool:
        """Whether training may restart. With several ranks the others would wait in the step for the failed one."""
        return self.may_adapt and self.config.memory.on_oom is OnOom.retry and self.options.world_size == 1

    def _with_less(self, failure: MemoryFailure, samples: int, trainer: Any) -> OutOfMemoryExhausted:
        """Returns the error that ends this training, with changes for a restart that needs less memory."""
        plan, step = self.plan, trainer.global_step + 1
        self.books.journal.event("oom", step=step, message=failure.message)
        samples = max(samples, plan.workload.effective_batch_size)
        micro = MicroBatches(largest_share(samples, self.options.accumulate))
        before, smaller = micro.size, micro.step_down()
        ran_out = f"Out of memory in step {step} with {counted(before, 'sample')} at a time: {failure.message}"
        if plan.memory.on_oom == "retry" and smaller is not None:
            changes: dict[str, object] = {
                "memory.micro_batch": smaller,
                "memory.accumulate": largest_share(samples, smaller),
            }
            if plan.loader.device_prefetch:
                changes["loader.device_prefetch"] = 0
            return RestartNeeded(ran_out, changes, failure.kind)
        others = []
        if smaller is not None:  # the plan does not split steps
            ran_out += f" Its steps are not done in smaller parts: {plan.memory.decided('on_oom').because}."
            others.append(f"workload.effective_batch_size={largest_share(samples, 2)}, which changes what is learned")
        by_part, ahead = breakdown.bytes_by_part(self.module, trainer.optimizers), plan.loader.device_prefetch
        way_out = breakdown.way_out(by_part, precision=plan.device.precision, batches_ahead=ahead, others=others)
        return OutOfMemoryExhausted(f"{ran_out} {way_out}", failure.kind)

    def parts(self) -> dict[str, Any]:
        """Returns the arguments of `TimedLoader` that split batches into parts."""
        split = Preparation(self.objects.data.train, self.config.seed).split
        return {"num_parts": self.options.accumulate, "split": split}

    def measuring(self) -> AbstractContextManager[Any]:
        """Returns a context without the module's other hooks, which may use metrics of a validation."""
        return steps_alone(self.module, is_set_up=False, moves=True)

    def evaluates(self, split: str) -> bool:
        """Returns whether the workload has that split, and the module a step for it."""
        return super().evaluates(split) and lit.has_step(self.module, split)

    def batches(self, deliveries: Any) -> Any:
        """Returns the bare batches, which the module expects."""
        return BareBatches(deliveries)

    def test(self, trainer: Any, batches: Any, checkpoint: Path | None) -> None:
        """Tests. Lightning loads the weights, since hooks of the module may make layers first."""
        if self.plan.trainer.strategy == "fsdp":  # rank 0 alone knows of a checkpoint, and all ranks load their shards
            checkpoint = trainer.strategy.broadcast(checkpoint)
        weights_only = None if checkpoint is None else True
        with lit.restored_from(checkpoint):
            trainer.test(self.module, batches, verbose=False, ckpt_path=checkpoint, weights_only=weights_only)

    def misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Returns the first few weights that don't fit; none for a module that makes layers later."""
        return [] if additions.builds_itself_later(self.module) else super().misfits(weights)
