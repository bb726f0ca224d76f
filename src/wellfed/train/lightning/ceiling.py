"""Measures the ceiling: how fast the same steps go on batches that are on the device already.

They are real steps of the run's own module by a Trainer of their own, so they change weights, buffers and generators:
all of that is put back. A user's LightningModule does its steps alone: its hooks, callbacks and schedulers belong to
training, and would be called for an epoch that is none.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MethodType
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
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.train.lightning.callbacks.clock import Clock, TimedLoader
from wellfed.train.lightning.hooks import Together
from wellfed.train.lightning.module import StepModule
from wellfed.train.lightning.trainer import TrainerOptions, make_trainer, new_event_factory
from wellfed.train.lightning.user_module.data_module import DataModuleCallback

CEILING_BATCHES = 4
"""Distinct batches that are taken in turn; caches must not make them cheaper than real ones."""
FEWEST = 5
"""Timed steps of which a ceiling is known, if more were asked for."""
HOOKS = [name for room in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(room) if name.startswith("on_")]
"""Hooks of a LightningModule."""
_KEPT_HOOK = "on_after_batch_transfer"
"""Changes a batch on the device: without it the step would be another."""
_DONE_BEFORE = ("prepare_data", "setup", "configure_model", "teardown")
"""What a module has been through where it was trained."""


class CachedBatches:
    """A few batches already on the device, again and again: what training would be if data cost nothing."""

    def __init__(self, deliveries: Sequence[Delivery], length: int, most_s: float = math.inf) -> None:
        """``most_s``: no batch is given later than so many seconds after the first."""
        self._deliveries, self._length, self._most_s = deliveries, length, most_s

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Delivery]:
        ends_s = time.monotonic() + self._most_s
        for number in range(self._length):
            if time.monotonic() > ends_s:
                return
            delivery = copy.copy(self._deliveries[number % len(self._deliveries)])
            # A step may take what it was given apart; the next one with these tensors finds all in place.
            delivery.batch = batches.map_tensors(delivery.batch, lambda tensor: tensor)
            yield delivery


def whole(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Those of the full size: what is left at the end of an epoch is no measure."""
    largest = max((delivery.total for delivery in deliveries), default=0)
    return [delivery for delivery in deliveries if delivery.total == largest]


def run_ceiling(
    module: pl.LightningModule,
    deliveries: Sequence[Delivery],
    options: TrainerOptions,
    steps: int,
    folder: Path,
    data_module: Any = None,
    in_parts: Callable[[TimedLoader], Any] = lambda loader: loader,
    most_s: float = math.inf,
) -> StepSummary | None:
    """Time the same steps on these batches, which are copied to the device first; None if any rank is without.

    Stops early after ``most_s`` seconds where there is one rank, and gives None if fewer than `FEWEST` of the steps
    were timed by then; several ranks must do equally many, and do the smallest number that one was asked for.

    Whatever it raises, the module is as it was and on the CPU: weights, buffers, generators. Gradients are gone, and
    what the code of a user's module keeps elsewhere is not known here. One that a strategy shards stays sharded, and is
    of no further use.

    Args:
        in_parts: what the Trainer is given of a loader of whole batches.
    """
    steps = int(_least_of_ranks(steps if deliveries else 0, options))
    if steps == 0:
        return None
    rows: list[StepRow] = []
    is_ours, is_set_up = isinstance(module, StepModule), module._trainer is not None
    limited = replace(options, max_epochs=1, max_steps=None, max_time_s=None, validate_every_steps=None)
    trainer = make_trainer(limited, [], folder)
    trainer.limit_val_batches = 0
    device = trainer.strategy.root_device  # the module's own is the CPU, before a fit and after one
    clock = StepClock(new_event=new_event_factory(device))
    trainer.callbacks.append(Together([Clock(clock, rows.extend)]))
    if data_module is not None:  # a step may ask it
        trainer.callbacks.insert(0, DataModuleCallback(data_module))
    with put_back(module):
        module.trainer = trainer

        def moved(batch: Any) -> Any:
            if is_ours:
                return batches.to_device(batch, device)
            return module.transfer_batch_to_device(module.on_before_batch_transfer(batch, 0), device, 0)

        ready = [replace(delivery, batch=moved(delivery.batch), is_on_device=True) for delivery in deliveries]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the loader may use its host buffers again
        if not is_ours:
            trainer.logger = DummyLogger()  # what the module logs must have somewhere to go
        with module.plain.only_timed() if isinstance(module, StepModule) else steps_alone(module, is_set_up=is_set_up):
            cached = CachedBatches(ready, steps + WARMUP_STEPS, most_s if options.world_size == 1 else math.inf)
            trainer.fit(module, in_parts(TimedLoader(cached, clock, unwrap=not is_ours)))
    found = summarise(rows)
    return None if found is None or found.steps < min(steps, FEWEST) else found


def _least_of_ranks(value: float, options: TrainerOptions) -> float:
    """The smallest of all ranks' values; ranks that step alone would wait for the others."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    device = torch.device("cuda", torch.cuda.current_device()) if options.accelerator == "gpu" else torch.device("cpu")
    told = torch.tensor(float(value), device=device)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN)
    return float(told)


@contextmanager
def put_back(module: pl.LightningModule, *, only_buffers: bool = False) -> Iterator[None]:
    """On the way out parameters, buffers, modes and Trainer of the module are what they were, and all generators."""
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
    """Parameters and buffers by name; not those that the first batch has yet to make."""
    named = chain(module.named_parameters(), module.named_buffers())
    return ((name, value) for name, value in named if not is_lazy(value))


@contextmanager
def steps_alone(module: pl.LightningModule, *, is_set_up: bool, moves: bool = False) -> Iterator[None]:
    """Within, nothing of a user's LightningModule is called but what makes a step, ``setup`` if it is not set up, and
    what ``moves`` its batches to the device; else they are there already."""
    kept = (_KEPT_HOOK, "on_before_batch_transfer") if moves else (_KEPT_HOOK,)
    names = [name for name in HOOKS if name not in kept]
    names += ["configure_callbacks", *(_DONE_BEFORE if is_set_up else ())]
    own = module.configure_optimizers
    instead: dict[str, Any] = {name: MethodType(getattr(pl.LightningModule, name), module) for name in names}
    if not moves:
        instead["transfer_batch_to_device"] = lambda batch, device, number: batch
    if module.automatic_optimization:  # else schedulers are stepped by the step itself
        instead["configure_optimizers"] = lambda: _optimizers_of(own())
    with replaced(module, instead):
        yield


@contextmanager
def replaced(module: pl.LightningModule, instead: Mapping[str, Any]) -> Iterator[None]:
    """Within, the module has these attributes in place of its class's, or of its own."""
    own = {name: vars(module)[name] for name in instead if name in vars(module)}
    vars(module).update(instead)
    try:
        yield
    finally:
        for name in instead:
            del vars(module)[name]
        vars(module).update(own)


def _optimizers_of(configured: Any) -> Any:
    """What ``configure_optimizers`` has returned, in any of its forms, without the schedulers."""
    if isinstance(configured, dict):
        return configured["optimizer"]
    if not isinstance(configured, (list, tuple)):
        return configured
    if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        return configured[0]
    return [_optimizers_of(one) for one in configured]
