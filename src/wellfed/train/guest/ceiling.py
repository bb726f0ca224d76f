"""Measures the ceiling: the rate of the same steps on batches that are already on the device.

A separate Trainer makes real steps of the run's module. Weights, buffers and generators are restored afterwards. Hooks,
callbacks and schedulers of the module are not called, since there is no epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities import CombinedLoader

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.train.guest.data import replaced
from wellfed.train.guest.marks import samples_of
from wellfed.train.loop.ceiling import CEILING_BATCHES
from wellfed.train.memory import step_start

_HOOKS = [name for base in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(base) if name.startswith("on_")]
_OF_STEPS = ("on_before_batch_transfer", "on_after_batch_transfer")
"""Hooks that are a part of the step."""
_DONE_BEFORE = ("prepare_data", "setup", "teardown")
"""Methods that training has already called."""


class Repeated:
    """A loader that repeats a few batches."""

    def __init__(self, given: Sequence[Any], length: int) -> None:
        self._given, self._length = given, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._length):
            # A step may change the structure of its batch; the tensors are shared.
            yield batches.map_tensors(self._given[number % len(self._given)], lambda tensor: tensor)


def first_batches(loaders: Any) -> list[Delivery]:
    """Returns the first batches of the user's loaders. Nothing is drawn."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    with generators.kept(loaders):
        found = [batch for batch, *_ in islice(iter(combined), CEILING_BATCHES) if batch is not None]
        combined.reset()
    return [Delivery(batch, 0, number, samples_of(batch)) for number, batch in enumerate(found)]


def least_of_ranks(num_steps: int, trainer: pl.Trainer) -> int:
    """Returns the smallest number of all ranks, so that none waits for steps that others don't make."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return num_steps
    least = torch.tensor(num_steps, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


@contextmanager
def put_back(module: pl.LightningModule, data_module: Any) -> Iterator[None]:
    """Restores parameters, buffers, modes and Trainer of the module on exit, and all generators."""
    trainer, of_data = module._trainer, getattr(data_module, "trainer", None)
    try:
        with step_start.put_back(module):
            yield
    finally:
        module.trainer = trainer
        if data_module is not None:
            data_module.trainer = of_data


@contextmanager
def steps_alone(module: pl.LightningModule, data_module: Any = None, *, is_set_up: bool) -> Iterator[None]:
    """Disables all hooks of a module and its data that are not a part of a step.

    Args:
        data_module: module of data that are set up.
        is_set_up: False: the module's ``setup`` is called.
    """
    names = [name for name in _HOOKS if name not in _OF_STEPS]
    instead: dict[str, Any] = {name: MethodType(getattr(pl.LightningModule, name), module) for name in names}
    instead["configure_callbacks"] = list
    if is_set_up:
        instead |= dict.fromkeys((*_DONE_BEFORE, "configure_model"), _nothing)
    with ExitStack() as stack:
        stack.enter_context(replaced(module, instead))
        if data_module is not None:
            stack.enter_context(replaced(data_module, dict.fromkeys(_DONE_BEFORE, _nothing)))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing, in place of a hook."""


class NoSchedulers(pl.Callback):
    """Steps without the schedulers of ``configure_optimizers``, which count and may monitor a validation."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if module.automatic_optimization:  # with manual optimization the step calls them
            trainer.lr_scheduler_configs.clear()
