"""Measures the ceiling: the rate of the same steps on batches that are already on the device.

A separate Trainer makes real steps of the run's module. Weights, buffers and generators are restored afterwards.
Hooks, callbacks and schedulers of a user's LightningModule are not called, since there is no epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.nn.parameter import is_lazy

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepRow
from wellfed.train.lightning.callbacks.clock import Clock, TimedLoader
from wellfed.train.lightning.hooks import Together, replaced
from wellfed.train.lightning.module import StepModule
from wellfed.train.lightning.trainer import TrainerOptions, clock_of, make_trainer
from wellfed.train.lightning.user_module.data_module import DataModuleCallback

CEILING_BATCHES = 4
"""Number of distinct batches, used in turn so that caches don't make them cheaper than real ones."""
HOOKS = [name for base in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(base) if name.startswith("on_")]
"""Hooks of a LightningModule."""
_KEPT_HOOK = "on_after_batch_transfer"
"""Hook that changes a batch on the device, which is a part of the step."""
_DONE_BEFORE = ("prepare_data", "setup", "configure_model", "teardown")
"""Methods that training has already called."""


class CachedBatches:
    """A loader that repeats a few batches on the device."""

    def __init__(self, deliveries: Sequence[Delivery], length: int) -> None:
        self._deliveries, self._length = deliveries, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Delivery]:
        for number in range(self._length):
            delivery = copy.copy(self._deliveries[number % len(self._deliveries)])
            # A step may change the structure of its batch; the tensors are shared.
            delivery.batch = batches.map_tensors(delivery.batch, lambda tensor: tensor)
            yield delivery


def whole(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Returns the batches without a smaller last one of an epoch."""
    largest = max((delivery.total for delivery in deliveries), default=0)
    return [delivery for delivery in deliveries if delivery.total == largest]


def run_ceiling(
    module: pl.LightningModule,
    deliveries: Sequence[Delivery],
    options: TrainerOptions,
    steps: int,
    folder: Path,
    data_module: Any = None,
    parts: Mapping[str, Any] = MappingProxyType({}),
) -> StepSummary | None:
    """Times the same steps on these batches, which are copied to the device first.

    Returns None if a rank has no batches. Several ranks make the smallest number of steps that one of them requests.

    Weights, buffers and generators of the module are restored on the CPU, even after an error. Gradients are lost, and
    other state of a user's module is not restored, nor are the weights if this shards the module.

    Args:
        parts: arguments of `TimedLoader` that split batches into parts.
    """
    steps = _least_of_ranks(steps if deliveries else 0, options)
    if steps == 0:
        return None
    rows: list[StepRow] = []
    is_ours, is_set_up = isinstance(module, StepModule), module._trainer is not None
    limited = replace(options, max_epochs=1, max_steps=None, max_time_s=None, validate_every_steps=None)
    trainer = make_trainer(limited, [], folder)
    trainer.limit_val_batches = 0
    device = trainer.strategy.root_device  # outside of a fit, the module's own device is the CPU
    clock = clock_of(device)
    trainer.callbacks.append(Together([Clock(clock, rows.extend)]))
    if data_module is not None:  # a step may use it
        trainer.callbacks.insert(0, DataModuleCallback(data_module))
    with put_back(module):
        module.trainer = trainer

        def moved(batch: Any) -> Any:
            if is_ours:
                return batches.to_device(batch, device)
            return module.transfer_batch_to_device(module.on_before_batch_transfer(batch, 0), device, 0)

        ready = [replace(delivery, batch=moved(delivery.batch), is_on_device=True) for delivery in deliveries]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the loader may now reuse its host buffers
        if not is_ours:
            trainer.logger = DummyLogger()  # receives what the module logs
        with module.plain.only_timed() if isinstance(module, StepModule) else steps_alone(module, is_set_up=is_set_up):
            cached = CachedBatches(ready, steps + WARMUP_STEPS)
            trainer.fit(module, TimedLoader(cached, clock, unwrap=not is_ours, **parts))
    return summarise(rows)


def _least_of_ranks(steps: int, options: TrainerOptions) -> int:
    """Returns the smallest number of all ranks, so that none waits for steps that others don't make."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return steps
    least = torch.tensor(steps, device="cuda" if options.accelerator == "gpu" else "cpu")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


@contextmanager
def put_back(module: pl.LightningModule, *, only_buffers: bool = False) -> Iterator[None]:
    """Restores parameters, buffers, modes and Trainer of the module on exit, and all generators."""
    named = module.named_buffers() if only_buffers else _tensors(module)
    before = {name: value.detach().to("cpu", copy=True) for name, value in named}
    modes = [(part, part.training) for part in module.modules()]
    trainer, drawn = module._trainer, generators.state()
    module.zero_grad()
    try:
        yield
    finally:
        module.zero_grad()
        with torch.no_grad():
            for name, value in _tensors(module):
                if name in before and before[name].shape == value.shape:
                    value.copy_(before[name])
        for part, mode in modes:
            part.training = mode
        module.trainer = trainer
        generators.restore(drawn)


def _tensors(module: pl.LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers by name, except lazy ones."""
    named = chain(module.named_parameters(), module.named_buffers())
    return ((name, value) for name, value in named if not is_lazy(value))


@contextmanager
def steps_alone(module: pl.LightningModule, *, is_set_up: bool, moves: bool = False) -> Iterator[None]:
    """Disables all hooks of a user's LightningModule that are not a part of a step.

    ``setup`` is called if the module is not set up. Hooks that move a batch to the device stay only if ``moves``.
    """
    kept = (_KEPT_HOOK, "on_before_batch_transfer") if moves else (_KEPT_HOOK,)
    names = [name for name in HOOKS if name not in kept]
    names += ["configure_callbacks", *(_DONE_BEFORE if is_set_up else ())]
    own = module.configure_optimizers
    instead: dict[str, Any] = {name: MethodType(getattr(pl.LightningModule, name), module) for name in names}
    if not moves:
        instead["transfer_batch_to_device"] = lambda batch, device, number: batch
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
