"""Measures the rate of training's own steps on a few batches that are on the device already."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.errors import reason_of
from wellfed.lit import trainer as lit
from wellfed.lit.ceiling import CEILING_BATCHES, run_ceiling, whole
from wellfed.loading.train_loader import IterableLoader, TrainLoader
from wellfed.planning.run_plan import RunPlan
from wellfed.record import OnEvent
from wellfed.run import assemble
from wellfed.run.outcome import lost_rank

_LOG = logging.getLogger(__name__)
_LITTLE_MS = 500
"""By so much longer a few batches may take without worker processes, which must be started and ended for them."""


def rate_without_data(
    module: Any,
    few: Callable[[], list[Delivery]],
    options: lit.TrainerOptions,
    steps: int,
    folder: Path,
    on_event: OnEvent,
) -> float | None:
    """Samples/s; None where it can't be told. Whatever goes wrong is an event."""
    deliveries: list[Delivery] = []
    failure, summary = None, None
    try:
        deliveries = whole(few())
    except Exception as error:  # noqa: BLE001  it costs a figure; other ranks are told below
        failure = error
    try:
        summary = run_ceiling(module, deliveries, options, steps, folder)
    except Exception as error:  # noqa: BLE001  a user's step in another place than training
        failure = error
    if failure is not None:
        message = "another rank failed in it" if lost_rank(failure) else reason_of(failure)
        _LOG.warning("The ceiling could not be measured: %s", message)
        _LOG.info("it ended by", exc_info=failure)
        on_event("ceiling_failed", message=message)
    return None if summary is None else summary.samples_per_s


def first_batches(loader: TrainLoader | IterableLoader) -> list[Delivery]:
    """Of an epoch, by the loader of training, which is closed and goes on after them."""
    loader.load_state_dict({**loader.state_dict(), "epoch": loader.epoch, "batch": 0})
    try:
        return list(islice(loader, CEILING_BATCHES))
    finally:
        loader.close()


def few_without_workers(
    config: RunConfig, plan: RunPlan, parts: assemble.Parts, loader: TrainLoader | IterableLoader
) -> list[Delivery] | None:
    """The same, built in this process where that is sooner than starting workers twice.

    None where it is not, or where it can't be done.
    """
    known, planned = parts.first_batches, plan.loader
    if known is None or not planned.has_processes:
        return None
    later_ms = CEILING_BATCHES * known.build_ms * (1 - 1 / planned.num_workers)
    if later_ms > _LITTLE_MS or config.loader.max_skipped:  # a sample may be expected to kill who loads it
        return None
    inline = assemble.make_inline_loader(config, parts.data)
    try:
        with closing(inline):
            few = list(islice(inline, CEILING_BATCHES))
    except Exception as error:  # noqa: BLE001  data that loads in workers alone; else training tells
        _LOG.info("the first batches could not be built without workers: %r", error)
        return None
    loader.load_state_dict(inline.state_dict())
    return few
