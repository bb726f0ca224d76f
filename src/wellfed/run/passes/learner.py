"""Defines the common base of plain models and the user's LightningModules: Trainers for the passes of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellfed import generators
from wellfed.config.schema import RunConfig
from wellfed.data.own_loader import loader_of
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.plan.run_plan import RunPlan
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.objects.evaluation import eval_device_prefetch, make_eval_loader, named_best
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.callbacks.users import steps_only, time_hooks
from wellfed.train.lightning.checkpoints.checkpoints import BeforeUsers, Checkpoints
from wellfed.train.lightning.hooks import replaced
from wellfed.train.lightning.prefetch import prefetched
from wellfed.train.lightning.user_module.additions import make_user_trainer
from wellfed.train.lightning.user_module.data_module import DataModuleCallback

_LOG = logging.getLogger(__name__)


@dataclass
class Learner:
    """A configured model with Trainers for its passes; base of `ModelLearner` and `ModuleLearner`."""

    config: RunConfig
    objects: RunObjects
    plan: RunPlan
    books: Bookkeeper
    options: lit.TrainerOptions
    figures: Figures
    may_adapt: bool
    """False: an out-of-memory error ends the run, whatever the plan allows."""
    rank: int
    module: Any = field(init=False)
    shares_evaluation: bool = field(default=False, init=False)
    """Ranks share the batches of an evaluation. False for a LightningModule, whose log entries may be per rank."""
    own_best: tuple[str, Any] = field(default=("loss", "min"), init=False)
    """Name and direction of the metric that picks the best checkpoint, if the configuration names none."""

    def begin_pass(self) -> None:
        """Prepares the module before each pass over a split."""

    def training(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], *, is_timed: bool = False
    ) -> Any:
        """Returns a Trainer to train with; ``last`` are the callbacks that must come after all others.

        Args:
            is_timed: the training is only timed. Of the user's callbacks only the hooks of its steps are called.
        """
        before = [BeforeUsers(one) for one in last if isinstance(one, Checkpoints)]
        users = list(self.objects.callbacks.values())
        for user in users if is_timed else ():
            time_hooks(user, self.books.wall)
        return self._trainer(options, [*callbacks, *before], last, steps_only(users) if is_timed else users)

    def evaluating(self, callbacks: Sequence[Any]) -> Any:
        """Returns a Trainer for a pass over validation or test data."""
        return self._trainer(self.options, callbacks, [], list(self.objects.callbacks.values()))

    def _trainer(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], users: Sequence[Any]
    ) -> Any:
        """Returns a Trainer for the user's module or callbacks, which may log by themselves."""
        asked, books = self.config.trainer, self.books
        return self._with_data_module(
            make_user_trainer(
                options,
                callbacks,
                books.folder,
                users=users,
                last=last,
                loggers=for_trainer(books.loggers, self.figures.logged, books.folder),
                log_every=asked.log_every_steps,
                sanity_batches=asked.sanity_batches if self.objects.is_lightning_module else 0,
                wall=books.wall,
            )
        )

    def _with_data_module(self, trainer: Any) -> Any:
        if self.objects.data_module is not None:
            trainer.callbacks.insert(0, DataModuleCallback(self.objects.data_module))
        return trainer

    def fit(self, trainer: Any, loader: Any, val_batches: Any, checkpoint: Path | None) -> None:
        """Trains with a Trainer of `training`; resumes from a checkpoint if there is one.

        Raises:
            OutOfMemoryExhausted: memory does not suffice, and this training has no fallback left.
        """
        with replaced(self.module, self._timed_hooks()):
            lit.fit(trainer, self.module, loader, val_batches, checkpoint)

    def _timed_hooks(self) -> dict[str, Any]:
        """Returns attributes of the module that account for the time of the user's hooks."""
        return {}

    def parts(self) -> dict[str, Any]:
        """Returns the arguments of `TimedLoader` that split batches into parts; none for whole batches."""
        return {}

    def measuring(self) -> AbstractContextManager[Any]:
        """Returns the context of a training that is only timed."""
        return nullcontext()

    def evaluates(self, split: str) -> bool:
        """Returns whether the workload has that split and can evaluate it."""
        return getattr(self.objects.data, split) is not None

    def _eval_loader(self, split: str, **more: Any) -> Any:
        return make_eval_loader(self.config, self.plan, self.objects.data, split, **more)

    def check_splits(self) -> None:
        """Raises the DataError of a split without batches before training. Warns of a metric without validation."""
        best = self.config.trainer.best_metric
        if best is not None and not self.evaluates("val"):
            _LOG.warning(
                "trainer.best_metric=%s has no effect: there is no validation. Give the data a val split.", best
            )
        for split in ("val", "test"):
            if self.evaluates(split):
                self._eval_loader(split).close()

    @contextmanager
    def open_split(self, split: str, trainer: Any) -> Iterator[Any]:
        """Yields the batches of a split for a Trainer, copied ahead as in training; None if it is not evaluated."""
        if not self.evaluates(split):
            yield None
            return
        share = {"rank": self.rank, "world_size": self.options.world_size} if self.shares_evaluation else {}
        loader, device = self._eval_loader(split, **share), trainer.strategy.root_device
        ahead = eval_device_prefetch(self.plan, self.objects.data, split)
        with closing(loader), prefetched(loader, self.module, device, ahead, is_training=False) as deliveries:
            yield self.batches(deliveries)

    @contextmanager
    def few(self, split: str) -> Iterator[Any]:
        """Yields the first batches of a split."""
        loader, few = loader_of(self.objects.data, split), self.config.trainer.sanity_batches
        with generators.kept(loader), closing(self._eval_loader(split, few=few)) as deliveries:
            yield deliveries

    def batches(self, deliveries: Any) -> Any:
        """Returns the batches of an evaluated split for the Trainer."""
        return deliveries

    def test(self, trainer: Any, batches: Any, checkpoint: Path | None) -> None:
        """Runs a pass over the test split, with a checkpoint's weights or the current ones."""
        raise NotImplementedError

    def artifacts(self) -> dict[str, Path]:
        """Returns the files that the evaluation writes."""
        return {}

    def misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Returns the first few weights that don't fit this model."""
        return lit.misfits(self.module, weights)

    def best_metric(self) -> tuple[str, Any]:
        """Returns name and direction of the metric that picks the best checkpoint."""
        name, mode = named_best(self.config, self.objects), self.config.trainer.best_mode
        return name or self.own_best[0], self.own_best[1] if mode is None else mode.value
