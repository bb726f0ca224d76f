"""Measures the ceiling: the rate of the same steps on batches that are already on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.record.entries import ignore_event
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.training import Limits, Training, Watchers
from wellfed.train.memory import oom
from wellfed.train.memory.step_start import put_back
from wellfed.train.step.totals import Totals

CEILING_BATCHES = 4
"""Number of distinct batches, used in turn so that caches don't make them cheaper than real ones."""


class CachedBatches:
    """A loader that repeats a few batches on the device, for one epoch."""

    def __init__(self, deliveries: Sequence[Delivery], length: int) -> None:
        self._deliveries, self._length = deliveries, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Delivery]:
        for number in range(self._length):
            delivery = copy.copy(self._deliveries[number % len(self._deliveries)])  # keeps its counted size
            delivery.epoch, delivery.index = 0, number
            # A step may change the structure of its batch; the tensors are shared.
            delivery.batch = batches.map_tensors(delivery.batch, lambda tensor: tensor)
            yield delivery


def whole(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Returns the batches without a smaller last one of an epoch."""
    largest = max((delivery.total for delivery in deliveries), default=0)
    return [delivery for delivery in deliveries if delivery.total == largest]


def run_ceiling(model: PlacedModel, deliveries: Sequence[Delivery], steps: int, clock: StepClock) -> StepSummary | None:
    """Times the same steps on these batches, which are copied to the device first, with a new optimizer.

    Returns None if a rank has no batches, or no memory for them. Several ranks make the smallest number of steps that
    one of them requests. Weights, buffers and generators are restored, even after an error.
    """
    model.begin()
    copied = partial(batches.to_device, device=model.device)
    ready, _ = oom.attempt(lambda: [replace(one, batch=copied(one.batch), is_on_device=True) for one in deliveries])
    steps = min(model.place.gather(steps if ready else 0))  # else the others would wait in a step
    if not ready or steps == 0:
        return None
    rows: list[StepRow] = []
    timed = copy.copy(model)  # no step of the run: without its scheduler, events, metrics and fallbacks
    timed.options, timed.totals = replace(model.options, may_adapt=False), Totals()
    timed.on_event, timed.scheduling = ignore_event, None
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # the loader may now reuse its host buffers
    with put_back(model.whole, model.device):
        cached, limits = CachedBatches(ready, steps + WARMUP_STEPS), Limits(max_epochs=1)
        Training(timed, cached, limits, clock=clock, watchers=Watchers(take_rows=rows.extend)).fit()
    return summarise(rows)
