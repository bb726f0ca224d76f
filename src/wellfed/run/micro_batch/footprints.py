"""Estimates the device memory that the configured model needs, once for each setting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.contract import Batch
from wellfed.data.backend_benchmark import copied, longest_batch, without_side_effects
from wellfed.data.own_loader import first_batch, loader_of
from wellfed.errors import first_line
from wellfed.plan.predict.peak import Footprint, NoEstimate
from wellfed.plan.predict.rehearsal import Task, measure
from wellfed.plan.run_plan import RunPlan
from wellfed.run.objects import loaders, optimizers
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.train_step import parameter_groups

SAMPLES = 8
"""Number of samples whose length is measured. Larger batches repeat the samples of the longest one."""


class Footprints:
    """Estimates for one run's model. Call it with a feature mode and whether activations are checkpointed.

    Args:
        plan: decides the precision, and which processes build batches.
        samples: the largest micro-batch to estimate.
    """

    def __init__(self, config: RunConfig, plan: RunPlan, parts: RunObjects, *, samples: int) -> None:
        self._config, self._plan, self._parts, self._samples = config, plan, parts, samples
        self._own = loader_of(parts.data, "train")
        """The user's own loader; None without one."""
        self._train = cache(self._copied_data)
        self.batches = cache(self._make_batches)
        """Returns a function that makes batches of any size on the CPU for a feature mode, or a `NoEstimate`."""
        self.known = dict(parts.footprints or {})
        """All estimates so far, for another plan of the same model."""

    def __call__(self, features: str | None, checkpointed: bool) -> Footprint | NoEstimate:
        """Returns the footprint. The first call for a setting rehearses it."""
        key = (features, checkpointed)
        if key not in self.known:
            self.known[key] = self._rehearsed(*key)
        return self.known[key]

    def _rehearsed(self, features: str | None, checkpointed: bool) -> Footprint | NoEstimate:
        config, plan, parts = self._config, self._plan, self._parts
        if parts.guest is not None:
            return NoEstimate("Lightning's Trainer makes the steps")
        make_batch, sparse = self.batches(features), parts.has_sparse_gradients
        if isinstance(make_batch, NoEstimate):
            return make_batch
        task = Task(
            make_batch=make_batch,
            make_optimizer=lambda model: optimizers.make_optimizer(
                config, plan, parameter_groups(model), sparse=sparse
            ),
            prepare=Preparation(self._train(features), config.seed, parts.model),
            precision=plan.device.precision,
            checkpointed=checkpointed,
            features=None if parts.data.features is None else parts.features,
            feature_mode=features,  # type: ignore[arg-type]
        )
        with generators.kept(), redirect_stdout(sys.stderr):  # what a forward pass prints is no answer
            return measure(parts.model, task, self._samples)

    def _copied_data(self, features: str | None) -> Any:
        """Returns a copy of the training data for a feature mode, to keep a rehearsal's tensors out of training."""
        return copied(self._parts.for_features(features).data.train)

    def _make_batches(self, features: str | None) -> Callable[[int], Batch] | NoEstimate:
        train = self._train(features)
        try:
            if self._own is None:
                with without_side_effects():  # an error on too little data must name the user's sizes, not SAMPLES
                    self._loader(train, None)
            if callable(getattr(train, "split", None)):  # its tensors need not share the first dimension
                return partial(self._first_batch, train)
            with self._deliveries(train, min(SAMPLES, self._samples)) as deliveries:
                return partial(batches.repeated, longest_batch(deliveries))
        except Exception as error:  # noqa: BLE001  training requests the same samples and raises it
            return NoEstimate(f"no batch could be built: {first_line(error)}")

    def _first_batch(self, train: Any, size: int) -> Batch:
        with unset_fake_temporarily(), self._deliveries(train, size) as deliveries:  # workers need real tensors
            return next(deliveries).batch

    @contextmanager
    def _deliveries(self, train: Any, size: int) -> Iterator[Iterator[Delivery]]:
        """Yields batches of ``size`` samples, built as in training: a sample may end the process that loads it."""
        deliveries: Any = self._of_own(size) if self._own is not None else iter(self._loader(train, size))
        with without_side_effects(), closing(deliveries):
            yield deliveries

    def _of_own(self, size: int) -> Iterator[Delivery]:
        """Yields a batch of the user's own loader, which stays unread."""
        batch = first_batch(self._own, size)
        yield Delivery(batch, 0, 0, batches.batch_size(batch))

    def _loader(self, train: Any, batch_size: int | None) -> Any:
        data, settings = replace(self._parts.data, train=train), loaders.one_off_settings(self._config, self._plan)
        return loaders.make_train_loader(self._config, settings, data, batch_size=batch_size)
