"""Estimates what the configured model needs of device memory, once for each setting, and keeps it on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn, optim

from wellfed.batches import Delivery
from wellfed.config.schema import Allocator, RunConfig
from wellfed.contract import Batch
from wellfed.data.backend_benchmark import copied, without_side_effects
from wellfed.data.longest_batch import Longest, longest_batch
from wellfed.data.streams.stream import Stream
from wellfed.data.streams.stream_loader import StreamLoader
from wellfed.data.train_loader import TrainLoader
from wellfed.errors import first_line
from wellfed.plan.predict import estimate
from wellfed.plan.predict.cache import cached_measure, digest
from wellfed.plan.predict.footprint import Footprint, KnownFootprints, NoEstimate
from wellfed.plan.predict.forked_estimate import in_fork
from wellfed.plan.predict.rehearsal import Task
from wellfed.plan.run_plan import RunPlan
from wellfed.run.objects import loaders, optimizers
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.train_step import parameter_groups
from wellfed.units import show_bytes

SAMPLES = 8
"""Of a batch that is looked at. Those of the longest one stand for all: larger batches are the same ones again."""


class Footprints:
    """The estimates of one run's model; call it with a feature mode and whether activations are checkpointed.

    Args:
        plan: what is decided already: precision, who builds batches.
        samples: of the largest micro-batch that is of interest.
        host_bytes: what runs on real tensors may take, where a model can't be rehearsed on fake ones.
    """

    def __init__(self, config: RunConfig, plan: RunPlan, parts: RunObjects, *, samples: int, host_bytes: int) -> None:
        self._config, self._plan, self._parts = config, plan, parts
        self._samples, self._host_bytes = samples, host_bytes
        self._trains: dict[str | None, Any] = {}
        self._batches: dict[str | None, Callable[[int], Batch] | NoEstimate] = {}
        before = parts.footprints or KnownFootprints({})
        self._known, self._looked_at_before = dict(before.found), before.looked_at
        self._digests = dict(before.digests)
        self._longest: Longest | None = None

    def __call__(self, features: str | None, checkpointed: bool) -> Footprint | NoEstimate:
        """Rehearsed at the first question, remembered after."""
        key = (features, checkpointed)
        if key not in self._known:
            self._known[key] = self._measure(features, checkpointed)
        return self._known[key]

    def digest(self, features: str | None, checkpointed: bool) -> str | None:
        """16 hex digits that change with all that a footprint depends on; None where there is nothing to rehearse."""
        key = (features, checkpointed)
        if key not in self._digests:
            self._digests[key] = None
            with without_side_effects(), suppress(Exception):  # foreign code, of which training will tell
                task = self._task(features, checkpointed)
                if isinstance(task, Task):
                    self._digests[key] = digest(self._parts.model, task, self._samples)
        return self._digests[key]

    def _measure(self, features: str | None, checkpointed: bool) -> Footprint | NoEstimate:
        task, cache_dir = self._task(features, checkpointed), Path(self._config.paths.cache_dir)
        if isinstance(task, NoEstimate):
            return task
        model, host_bytes = self._parts.model, self._host_bytes
        return in_fork(lambda: cached_measure(model, task, self._samples, cache_dir, host_bytes=host_bytes))

    def _task(self, features: str | None, checkpointed: bool) -> Task | NoEstimate:
        """A step of training, to be rehearsed."""
        if self._parts.is_lightning_module:
            return NoEstimate("a LightningModule runs its own step")
        make_batch, train = self.batches(features), self._train(features)
        if isinstance(make_batch, NoEstimate):
            return make_batch

        def make_optimizer(model: nn.Module) -> optim.Optimizer:
            groups, sparse = parameter_groups(model), self._parts.has_sparse_gradients
            return optimizers.make_optimizer(self._config, self._plan, groups, sparse=sparse)

        return Task(
            make_batch=make_batch,
            make_optimizer=make_optimizer,
            prepare=Preparation(train, self._config.seed, self._parts.model),
            precision=self._plan.device.precision,
            checkpointed=checkpointed,
            features=None if self._parts.data.features is None else self._parts.features,
            feature_mode=features,  # type: ignore[arg-type]
            compile_mode=self._plan.device.compile,
            shaped_by=(train,),
            expandable_segments=self._config.gpu.allocator is Allocator.expandable,
        )

    @property
    def looked_at(self) -> str:
        """Which samples stand for all, where they differ in length; empty where they do not, or nobody asked yet."""
        found = self._longest
        if found is None:
            return self._looked_at_before
        if not found.is_longer:
            return ""
        shortest, longest = show_bytes(found.shortest_bytes), show_bytes(found.longest_bytes)
        return f"for samples as in the longest of {found.num_batches} small batches ({shortest} to {longest} each)"

    @property
    def known(self) -> KnownFootprints:
        """All that was asked for, to be handed to who asks for the same."""
        return KnownFootprints(dict(self._known), self.looked_at, dict(self._digests))

    def batches(self, features: str | None) -> Callable[[int], Batch] | NoEstimate:
        """Makes batches of any size on the CPU, out of the longest of the first samples of the training data.

        Args:
            features: the mode that they are made for.
        """
        if features not in self._batches:
            self._batches[features] = self._make_batches(self._train(features))
        return self._batches[features]

    def _train(self, features: str | None) -> Any:
        """The training data in a feature mode: a copy, since what it keeps of a rehearsal (a tensor made once) must not
        reach training."""
        if features not in self._trains:
            self._trains[features] = copied(self._parts.for_features(features).data.train)
        return self._trains[features]

    def _make_batches(self, train: Any) -> Callable[[int], Batch] | NoEstimate:
        try:
            with without_side_effects():  # too little data is told in the user's sizes, not in those of a look at a few
                self._loader(train, None)
            if callable(getattr(train, "split", None)):  # its parts need not share the first dimension
                return partial(self._first_batch, train)
            with self._deliveries(train, min(SAMPLES, self._samples)) as deliveries:
                # A stream's own batches are as large as they are: no more of them is read than must be.
                is_one = isinstance(train, Stream) and train.gives_batches
                self._longest = longest_batch(islice(deliveries, 1) if is_one else deliveries)
            return estimate.repeated(self._longest.batch)
        except Exception as error:  # noqa: BLE001  training asks for the same samples and tells
            return NoEstimate(f"no batch could be built: {first_line(error)}")

    def _first_batch(self, train: Any, size: int) -> Batch:
        with self._deliveries(train, size) as deliveries:
            return next(deliveries).batch

    @contextmanager
    def _deliveries(self, train: Any, size: int) -> Iterator[Iterator[Delivery]]:
        """Batches of ``size`` samples, built by whoever is to build batches in training: a sample may end the process
        that loads it."""
        deliveries: Any = iter(self._loader(train, size))
        with without_side_effects(), closing(deliveries):
            yield deliveries

    def _loader(self, train: Any, batch_size: int | None) -> TrainLoader | StreamLoader:
        data, settings = replace(self._parts.data, train=train), loaders.one_off_settings(self._config, self._plan)
        return loaders.make_train_loader(self._config, settings, data, batch_size=batch_size)
