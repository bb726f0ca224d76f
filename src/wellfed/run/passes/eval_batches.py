"""Reads the splits that are evaluated: whole ones during a run, and a few batches before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from wellfed.run.objects.evaluation import eval_device_prefetch, make_eval_loader
from wellfed.run.passes.learner import Learner
from wellfed.train.lightning.prefetch import prefetched

_LOG = logging.getLogger(__name__)


class EvalBatches:
    """Loaders of the splits that a learner evaluates."""

    def __init__(self, learner: Learner, rank: int) -> None:
        self._learner, self._rank = learner, rank
        self.open_loaders: dict[str, Any] = {}
        """Loaders of the splits that are currently read."""

    def _loader(self, split: str, **more: Any) -> Any:
        learner = self._learner
        return make_eval_loader(learner.config, learner.plan, learner.objects.data, split, **more)

    def check(self) -> None:
        """Raises the DataError of a split without batches before training. Warns of a metric without validation."""
        best = self._learner.config.trainer.best_metric
        if best is not None and not self._learner.evaluates("val"):
            _LOG.warning(
                "trainer.best_metric=%s has no effect: there is no validation. Give the data a val split.", best
            )
        for split in ("val", "test"):
            if self._learner.evaluates(split):
                self._loader(split).close()

    @contextmanager
    def open(self, split: str, trainer: Any) -> Iterator[Any]:
        """Yields the batches of a split for a Trainer, copied ahead as in training; None if it is not evaluated."""
        learner, plan = self._learner, self._learner.plan
        if not learner.evaluates(split):
            yield None
            return
        share = {"rank": self._rank, "world_size": learner.options.world_size} if learner.shares_evaluation else {}
        loader = self.open_loaders[split] = self._loader(split, **share)
        ahead, device = eval_device_prefetch(plan, getattr(learner.objects.data, split)), trainer.strategy.root_device
        try:
            with closing(loader), prefetched(loader, learner.module, device, ahead, is_training=False) as deliveries:
                yield learner.batches(deliveries)
        finally:
            del self.open_loaders[split]

    @contextmanager
    def few(self, split: str) -> Iterator[Any]:
        """Yields the first batches of a split."""
        with closing(self._loader(split, few=self._learner.config.trainer.sanity_batches)) as loader:
            yield loader
