"""Builds a workload of the project and its first batches for tests. A fault fails the test with its message alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from wellfed import generators
from wellfed.batches import Delivery, named_tensors, shapes_of
from wellfed.config.compose import compose
from wellfed.contract import FEATURE_MODES, Batch, Datasets, FeatureModeName, FeatureSource, LossOutput
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest
from wellfed.data.own_loader import is_stream
from wellfed.data.settings import LoaderSettings
from wellfed.errors import WellfedError
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.run.objects import loaders, optimizers
from wellfed.run.planner import Planner
from wellfed.train.memory.features import hold
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.train_step import parameter_groups

SAMPLES = 8
"""Maximum number of samples in a tested batch."""
CPU = torch.device("cpu")


def fail(text: str) -> NoReturn:
    """Fails the test with this text and no traceback, since the cause is in the project."""
    raise pytest.fail.Exception(text, pytrace=False) from None


@contextmanager
def plainly(workload: str) -> Iterator[None]:
    """Fails the test with the engine's message if the workload has a fault."""
    try:
        yield
    except WellfedError as error:
        fail("\n".join([f"workload={workload}: {error}", *getattr(error, "__notes__", ())]))


def differences(one: Batch, other: Batch, tolerance: float = 0.0) -> str:
    """Describes how two batches that should be equal differ; empty if they are equal.

    Args:
        tolerance: absolute and relative tolerance of floating point numbers.
    """
    left, right = dict(named_tensors(one)), dict(named_tensors(other))
    if list(left) != list(right):
        return f"they hold {', '.join(left) or 'no tensors'} and {', '.join(right) or 'no tensors'}"
    found = [(name, _difference(value, right[name], tolerance)) for name, value in left.items()]
    return "; ".join(f"{name} {text}" for name, text in found if text)


def _difference(one: Tensor, other: Tensor, tolerance: float) -> str:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {shapes_of(one)} and {shapes_of(other)}"
    if one.is_floating_point() or one.is_complex():
        unequal = ~torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        gaps = (one - other)[unequal].abs().nan_to_num(torch.inf)
        return f"differs by up to {float(gaps.max()):.3g}" if len(gaps) else ""
    num_unequal = int((one != other).sum())
    return f"differs in {num_unequal} of {one.numel()} values" if num_unequal else ""


class MadeWorkload:
    """Data and model of a workload, built from its yaml on the CPU."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        """Composes the overrides, reads the data and builds the model."""
        with plainly(name), generators.kept(), compose(words).without_folder() as composed:
            self._planner = Planner.start(composed, machine(torch_cuda()))
        self.name, self._config = name, self._planner.config
        self.parts = parts = self._planner.parts
        self.data = parts.data
        """All splits, before a mode of features is chosen."""
        self.is_stream = is_stream(self.data.train)
        self.loss_name, self.data_name = f"{type(parts.model).__name__}.loss", type(self.data.train).__name__
        """Names of the model's loss and of the training data in messages."""
        self.modes: tuple[FeatureModeName | None, ...] = (None,)
        """Correct modes of features, the usual one first; (None,) without features."""
        if parts.features is not None:
            self.modes = ("dynamic",) if parts.features.trainable else FEATURE_MODES

    def fail(self, text: str) -> NoReturn:
        """Fails the test; the text begins with the name of the workload."""
        fail(f"workload={self.name}: {text}")

    def model(self) -> nn.Module:
        """Returns a copy of the model as built."""
        return copy.deepcopy(self.parts.model)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Returns the model's loss on a prepared batch, checked as in training."""
        with plainly(self.name):
            return Loss(model)(batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the workload's optimizer for a copy of the model."""
        with plainly(self.name):
            rough, groups, sparse = self._planner.rough(), parameter_groups(model), self.parts.has_sparse_gradients
            return optimizers.make_optimizer(self._config, rough, groups, sparse=sparse)

    def data_for(self, mode: FeatureModeName | None) -> Datasets:
        """Returns the splits for a mode of features."""
        return self.parts.for_features(mode).data

    def source(self, mode: FeatureModeName | None) -> FeatureSource | None:
        """Returns feature rows in that mode; None without features."""
        features = self.parts.features
        return None if features is None or mode is None else hold(features, mode, CPU)

    def first_batch(self, mode: FeatureModeName | None) -> Delivery:
        """Returns the first training batch, cut to a few samples if possible."""
        data = self.data_for(mode)
        with plainly(self.name):
            size = min(SAMPLES, len(data.train)) if hasattr(data.train, "__len__") and not self.is_stream else SAMPLES
            config = replace(self._config, workload=replace(self._config.workload, drop_last=False))
            with closing(loaders.make_train_loader(config, LoaderSettings(), data, batch_size=size)) as loader:
                return next(iter(loader))

    def preparation(self, mode: FeatureModeName | None, split: str = "train") -> Preparation:
        """Returns an object that calls ``on_device``, ``weight`` and ``split`` of a split's data."""
        return Preparation(getattr(self.data_for(mode), split), self._config.seed, self.parts.model)

    def prepared(self, mode: FeatureModeName | None) -> Batch:
        """Returns the first batch as passed to the model."""
        delivery = self.first_batch(mode)
        return self.preparation(mode)(delivery.batch, delivery, 0, self.source(mode))

    def built(self, mode: FeatureModeName | None, *, by_item: bool, place: int = 0) -> Batch:
        """Returns a batch of the first training samples, built by ``fetch`` or by ``__getitem__`` and collating.

        Args:
            place: number of the batch, which determines its random numbers.
        """
        data = self.data_for(mode)
        builder = BatchBuilder(data.train, self._config.seed, collate=data.collate, by_item=by_item)
        with plainly(self.name):
            built = builder(BatchRequest(0, place, torch.arange(min(SAMPLES, len(data.train)))))
        if built.lost:
            first, how = built.lost[0], "__getitem__" if by_item else "fetch"
            self.fail(f"{self.data_name}.{how} raises for sample {first.index}: {first.reason}")
        return built.batch
