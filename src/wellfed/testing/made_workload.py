"""Builds a workload of the project and its first batches for tests. A fault fails the test with its message alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from wellfed import generators
from wellfed.batches import Delivery, named_tensors
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
from wellfed.train.step.compiled import Loss
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
    left, right = named_tensors(one), named_tensors(other)
    if [name for name, _ in left] != [name for name, _ in right]:
        return f"they hold {_listed(left)} and {_listed(right)}"
    found = (_difference(name, value, match, tolerance) for (name, value), (_, match) in zip(left, right, strict=True))
    return "; ".join(filter(None, found))


def _listed(named: list[tuple[str, Tensor]]) -> str:
    return ", ".join(name for name, _ in named) or "no tensors"


def _difference(name: str, one: Tensor, other: Tensor, tolerance: float) -> str:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name} is {_kind(one)} and {_kind(other)}"
    if torch.equal(one, other):
        return ""
    if one.is_floating_point() or one.is_complex():
        if torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            return ""
        gap = (one - other).abs().nan_to_num(torch.inf).masked_fill(one.isnan() & other.isnan(), 0)
        return f"{name} differs by up to {float(gap.max()):.3g}"
    return f"{name} differs in {int((one != other).sum())} of {one.numel()} values"


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class MadeWorkload:
    """Data and model of a workload, built from its yaml on the CPU."""

    name: str
    planner: Planner

    @classmethod
    def of(cls, name: str, words: Sequence[str]) -> MadeWorkload:
        """Composes the overrides, reads the data and builds the model."""
        with plainly(name), generators.kept(), compose(words).without_folder() as composed:
            return cls(name, Planner.start(composed, machine(torch_cuda())))

    def fail(self, text: str) -> NoReturn:
        """Fails the test; the text begins with the name of the workload."""
        fail(f"workload={self.name}: {text}")

    @property
    def loss_name(self) -> str:
        """Name of the model's loss in messages."""
        return f"{type(self.planner.parts.model).__name__}.loss"

    @property
    def data_name(self) -> str:
        """Name of the training data in messages."""
        return type(self.data.train).__name__

    @property
    def data(self) -> Datasets:
        """All splits, before a mode of features is chosen."""
        return self.planner.parts.data

    @property
    def is_stream(self) -> bool:
        """Whether the training data are a stream."""
        return is_stream(self.data.train)

    @property
    def splits_itself(self) -> bool:
        """Whether the training data have a ``split`` of their own."""
        return callable(getattr(self.data.train, "split", None))

    @property
    def modes(self) -> tuple[FeatureModeName | None, ...]:
        """Correct modes of features, the usual one first; (None,) without features."""
        features = self.planner.parts.features
        return (None,) if features is None else ("dynamic",) if features.trainable else FEATURE_MODES

    def model(self) -> nn.Module:
        """Returns a copy of the model as built."""
        return copy.deepcopy(self.planner.parts.model)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Returns the model's loss on a prepared batch, checked as in training."""
        with plainly(self.name):
            return Loss(model, "none", lambda _: None)(batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the workload's optimizer for a copy of the model."""
        planner, parts = self.planner, self.planner.parts
        with plainly(self.name):
            groups = parameter_groups(model)
            return optimizers.make_optimizer(planner.config, planner.rough(), groups, sparse=parts.has_sparse_gradients)

    def data_for(self, mode: FeatureModeName | None) -> Datasets:
        """Returns the splits for a mode of features."""
        return self.planner.parts.for_features(mode).data

    def source(self, mode: FeatureModeName | None) -> FeatureSource | None:
        """Returns feature rows in that mode; None without features."""
        features = self.planner.parts.features
        return None if features is None or mode is None else hold(features, mode, CPU)

    def first_batch(self, mode: FeatureModeName | None) -> Delivery:
        """Returns the first training batch, cut to a few samples if possible."""
        data = self.data_for(mode)
        with plainly(self.name):
            size = min(SAMPLES, len(data.train)) if hasattr(data.train, "__len__") and not self.is_stream else SAMPLES
            config = self.planner.config
            config = replace(config, workload=replace(config.workload, drop_last=False))
            loader = loaders.make_train_loader(config, LoaderSettings(), data, batch_size=size)
            try:
                return next(iter(loader))
            finally:
                loader.close()

    def preparation(self, mode: FeatureModeName | None, split: str = "train") -> Preparation:
        """Returns an object that calls ``on_device``, ``weight`` and ``split`` of a split's data."""
        return Preparation(getattr(self.data_for(mode), split), self.planner.config.seed, self.planner.parts.model)

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
        builder = BatchBuilder(data.train, self.planner.config.seed, collate=data.collate, by_item=by_item)
        with plainly(self.name):
            built = builder(BatchRequest(0, place, torch.arange(min(SAMPLES, len(data.train)))))
        if built.lost:
            first, how = built.lost[0], "__getitem__" if by_item else "fetch"
            self.fail(f"{self.data_name}.{how} raises for sample {first.index}: {first.reason}")
        return built.batch
