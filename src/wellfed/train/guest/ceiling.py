"""Measures the ceiling: the rate of the same steps on batches that are already on the device.

A separate Trainer makes real steps of the run's module. Weights, buffers and generators are restored afterwards. Hooks,
callbacks and schedulers of the module are not called, since there is no epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from wellfed.train.guest.marks import is_overridden, samples_of
from wellfed.train.loop.ceiling import CEILING_BATCHES
from wellfed.train.memory import step_start

HOOKS = [name for base in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(base) if name.startswith("on_")]
"""Hooks of a LightningModule."""
_KEPT_HOOK = "on_after_batch_transfer"
"""Hook that changes a batch on the device, which is a part of the step."""
_DONE_BEFORE = ("prepare_data", "setup", "configure_model", "teardown")
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


class Glance:
    """First batches of the user's loaders, as the engine's loader gives them. Nothing is drawn."""

    epoch = 0

    def __init__(self, loaders: Callable[[], Any]) -> None:
        self._loaders = loaders

    def state_dict(self) -> dict[str, Any]:
        """Returns the start position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: each pass is one from the start."""

    def close(self) -> None:
        """Does nothing: a pass closes what it has opened."""

    def __iter__(self) -> Iterator[Delivery]:
        loaders = self._loaders()
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        with generators.kept(loaders):
            found = [batch for batch, *_ in islice(iter(combined), CEILING_BATCHES) if batch is not None]
            combined.reset()
        for number, batch in enumerate(found):
            yield Delivery(batch, 0, number, samples_of(batch))


def on_device(module: pl.LightningModule, data_module: Any, given: Sequence[Any], device: torch.device) -> list[Any]:
    """Returns the batches as the hooks of module or data module bring them to the device."""

    def hook(name: str) -> Any:
        return getattr(_owner(module, data_module, name), name)

    before, move = hook("on_before_batch_transfer"), hook("transfer_batch_to_device")
    moved = [move(before(batch, 0), device, 0) for batch in given]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return moved


def _owner(module: pl.LightningModule, data_module: Any, hook: str) -> Any:
    """Returns the object whose hook Lightning calls for a batch."""
    return data_module if data_module is not None and is_overridden(data_module, hook) else module


def least_of_ranks(num_steps: int, trainer: pl.Trainer) -> int:
    """Returns the smallest number of all ranks, so that none waits for steps that others don't make."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return num_steps
    least = torch.tensor(num_steps, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


@contextmanager
def put_back(module: pl.LightningModule) -> Iterator[None]:
    """Restores parameters, buffers, modes and Trainer of the module on exit, and all generators."""
    trainer = module._trainer
    try:
        with step_start.put_back(module):
            yield
    finally:
        module.trainer = trainer


@contextmanager
def steps_alone(
    module: pl.LightningModule, data_module: Any = None, *, is_set_up: bool, moves: bool = False
) -> Iterator[None]:
    """Disables all hooks of a LightningModule that are not a part of a step.

    ``setup`` is called if the module is not set up. Hooks that move a batch to the device stay only if ``moves``.
    """
    kept = (_KEPT_HOOK, "on_before_batch_transfer") if moves else (_KEPT_HOOK,)
    names = [name for name in HOOKS if name not in kept]
    names += ["configure_callbacks", *(_DONE_BEFORE if is_set_up else ())]
    own = module.configure_optimizers
    instead: dict[str, Any] = {name: MethodType(getattr(pl.LightningModule, name), module) for name in names}
    if not moves:
        instead["transfer_batch_to_device"] = lambda batch, device, number: batch
        if (after := _owner(module, data_module, _KEPT_HOOK)) is not module:
            instead[_KEPT_HOOK] = getattr(after, _KEPT_HOOK)
    if module.automatic_optimization:  # with manual optimization the step calls the schedulers
        instead["configure_optimizers"] = lambda: _optimizers_of(own())
    with replaced(module, instead):
        yield


def _optimizers_of(configured: Any) -> Any:
    """Returns the optimizers in any form of the result of ``configure_optimizers``."""
    if isinstance(configured, dict):
        return configured["optimizer"]
    if not isinstance(configured, (list, tuple)):
        return configured
    if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        return configured[0]
    return [_optimizers_of(one) for one in configured]


class WithDataModule(pl.Callback):
    """Data module for the steps of a Trainer that has other loaders; Lightning neither sets it up nor ends it."""

    def __init__(self, data_module: Any) -> None:
        self._data_module = data_module
        self._before = data_module.trainer

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        trainer.datamodule, self._data_module.trainer = self._data_module, trainer

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.datamodule, self._data_module.trainer = None, self._before
