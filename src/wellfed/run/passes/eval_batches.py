"""Reads the splits that are evaluated: whole ones during a run, and a few batches before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from wellfed.batches import num_bytes
from wellfed.data.eval_loader import EvalLoader
from wellfed.observe.hardware.detect import shm_gib
from wellfed.plan.loader import PREFETCH_FACTOR
from wellfed.plan.ready_batches import ReadyBatches
from wellfed.run.objects.evaluation import eval_device_prefetch, make_eval_loader
from wellfed.run.passes.learner import Learner
from wellfed.train.lightning.prefetch import prefetched
from wellfed.units import GIB, counted

_LOG = logging.getLogger(__name__)


class EvalBatches:
    """Loaders of the splits that a learner evaluates. Workers are limited to /dev/shm once batch sizes are known."""

    def __init__(self, learner: Learner, rank: int) -> None:
        self._learner, self._rank = learner, rank
        self.open_loaders: dict[str, Any] = {}
        """Loaders of the splits that are currently read."""
        self._num_bytes: dict[str, int] = {}
        """Bytes of the largest batch that `few` has read of each split."""

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
        self._limit_workers(split)
        ahead, device = eval_device_prefetch(plan, getattr(learner.objects.data, split)), trainer.strategy.root_device
        try:
            with closing(loader), prefetched(loader, learner.module, device, ahead, is_training=False) as deliveries:
                yield learner.batches(deliveries)
        finally:
            del self.open_loaders[split]

    @contextmanager
    def few(self, split: str) -> Iterator[Any]:
        """Yields the first batches of a split. All others are assumed to be as large."""
        with closing(self._loader(split, few=self._learner.config.trainer.sanity_batches)) as loader:
            yield self._measured(split, loader)
        self._limit_workers(split)

    def _measured(self, split: str, loader: Any) -> Iterator[Any]:
        for delivery in loader:
            size = num_bytes(getattr(delivery, "batch", delivery))
            self._num_bytes[split] = max(size, self._num_bytes.get(split, 0))
            yield delivery

    def _limit_workers(self, split: str) -> None:
        """Limits the workers of an open loader to what fits /dev/shm. The plan did not have their batch sizes."""
        loader = self.open_loaders.get(split)
        if split not in self._num_bytes or not isinstance(loader, EvalLoader):
            return
        had, free_gib = loader.settings, shm_gib()[1]
        if had.num_workers == 0 or had.backend == "threads" or free_gib is None:
            return
        factor, devices = had.prefetch_factor or PREFETCH_FACTOR, self._learner.options.devices
        size = self._num_bytes[split]
        ready = ReadyBatches(had.num_workers, factor, devices, size, len(loader), True, "/dev/shm", free_gib * GIB)
        if not ready.is_full:
            return
        most = ready.most_workers
        if most == 0:
            factor = 1
            # Without workers the copying thread would build, and draw from the process's generators.
            has_fetch = callable(getattr(getattr(self._learner.objects.data, split), "fetch", None))
            may_build_here = self._learner.plan.loader.device_prefetch == 0 or has_fetch
            fits_one = not replace(ready, num_workers=1, prefetch_factor=1).is_full
            most = 1 if fits_one or not may_build_here else 0
        loader.limit(most, factor)
        now = f"{counted(most, 'worker')} with loader.prefetch_factor={factor}" if most else "no workers"
        _LOG.warning("Evaluating %s: %s. It has %s instead.", split, ready.describe(), now)
