"""Times the first batches of an epoch, made by each backend that could be chosen. Judges nothing: planning does.

A candidate feeds a loop that asks for a batch and is then busy for a step: asleep when training runs on a GPU, or at
real work when it runs on the CPU, where workers and the step share the cores. A step is as long as building one
batch takes, at least `SHORTEST_STEP_MS`. The steps are the same for all: what takes longer loses more.

The batches are those of epoch 0, whether or not a run goes on from a checkpoint. They come from loaders of the trial's
own and the process's random state is put back, so training finds everything as it would without a trial. Batches are
not pinned: that would start CUDA before Lightning has chosen the card.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.data.backends import bad_samples
from wellfed.data.backends.first_batches import SHORTEST_STEP_MS, BackendTime, FirstBatches
from wellfed.data.settings import LoaderSettings
from wellfed.data.streams.stream import Stream
from wellfed.data.streams.stream_loader import StreamLoader
from wellfed.data.train_loader import TrainLoader

_LOG = logging.getLogger(__name__)

_BUILDS, _BUILDS_S = 8, 0.02
"""At most so many batches, or so long, for the time of building one; at least one batch."""
_LOOP, _LOOP_S = 32, 0.25
"""The same for the loop of one candidate; at least `_FEWEST` batches."""
_FEWEST = 2


def time_first_batches(
    make: Callable[[LoaderSettings], TrainLoader | StreamLoader],
    candidates: Callable[[FirstBatches], Sequence[LoaderSettings]],
    first: LoaderSettings,
    *,
    on_gpu: bool,
    known: FirstBatches | None = None,
    data: Any = None,
) -> FirstBatches | None:
    """Milliseconds that a step and its batch take with each candidate; None if a batch can't be built.

    Then training asks for the same batch and tells the error as it always does; one that does not come in the timeout
    of ``first`` is such an error. Blocks for milliseconds where a batch is cheap, for up to about 2 s where it takes
    100 ms.

    Args:
        make: a loader of epoch 0 that shares nothing with the one of training.
        candidates: what is to be timed, now that building one batch with ``first`` has been.
        on_gpu: the step leaves the cores to the workers.
        known: what building one batch has shown before; not built again then.
        data: the dataset, whose own generators are put back.
    """
    with without_side_effects(data):
        try:
            found = known or _build(make(first))
        except Exception as error:  # noqa: BLE001  training meets it again, and tells
            _LOG.info("no batch could be built to time loader backends: %r", error)
            return None
        plans = candidates(found)
        if not plans:
            return found
        step = _busy(found.step_ms, on_gpu=on_gpu)
        timed: dict[str, BackendTime] = {}
        failed: list[str] = []
        for plan in plans:
            try:
                timed[plan.backend] = _loop(make(replace(plan, pin_memory=False)), step)
            except Exception as error:  # noqa: BLE001  the others may do; the plan names it
                _LOG.info("loader.backend=%s failed while it was timed: %r", plan.backend, error)
                failed.append(plan.backend)
        return replace(found, timed=timed, failed=tuple(failed))


def copied(dataset: Any) -> Any:
    """A shallow copy of a dataset, so that a file it opens on first use is not handed down to worker processes.

    The dataset itself where its class has ``__del__``, which might close what the copy shares, or can't be copied.
    """
    if isinstance(dataset, Stream):
        return dataset.on_a_copy()
    if hasattr(type(dataset), "__del__"):
        return dataset
    try:
        return copy.copy(dataset)
    except Exception:  # noqa: BLE001  a convenience for some datasets, needed by none
        return dataset


def _build(loader: TrainLoader | StreamLoader) -> FirstBatches:
    """Time to build a batch, and its size."""
    with closing(loader):
        deliveries = _endless(loader)
        batch = next(deliveries).batch
        size, uncut = batches.num_bytes(batch), batches.why_uncut(batch)
        del batch
        build_ms = statistics.median(_times_ms(deliveries, lambda: None, 1, _BUILDS, _BUILDS_S))
    return FirstBatches(build_ms, size, len(loader), max(SHORTEST_STEP_MS, build_ms), uncut=uncut)


def _loop(loader: TrainLoader | StreamLoader, step: Callable[[], None]) -> BackendTime:
    """What a step and its batch take; the first batch, with the start of the workers, is dropped."""
    with closing(loader):
        deliveries = _endless(loader)
        next(deliveries)
        step()
        periods_ms = _times_ms(deliveries, step, _FEWEST, _LOOP, _LOOP_S)
    noise_ms = statistics.stdev(periods_ms) / len(periods_ms) ** 0.5
    return BackendTime(statistics.fmean(periods_ms), noise_ms)


def _endless(loader: TrainLoader | StreamLoader) -> Iterator[Delivery]:
    """Epoch after epoch, as training asks for them."""
    return chain.from_iterable(repeat(loader))


def _times_ms(
    deliveries: Iterator[Delivery], step: Callable[[], None], fewest: int, most: int, longest_s: float
) -> list[float]:
    """Of the next batches, each with its step."""
    times_ms: list[float] = []
    began_s = last_s = time.perf_counter()
    while len(times_ms) < fewest or (len(times_ms) < most and last_s - began_s < longest_s):
        next(deliveries)
        step()
        now_s = time.perf_counter()
        times_ms.append(1000 * (now_s - last_s))
        last_s = now_s
    return times_ms


def _busy(step_ms: float, *, on_gpu: bool) -> Callable[[], None]:
    """Keeps the loop busy for a step."""
    if on_gpu:
        return partial(time.sleep, step_ms / 1000)
    left, right, out = (torch.ones(128, 128) for _ in range(3))

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    multiply(1)
    began_s = time.perf_counter()
    multiply(20)
    took_ms = 1000 * (time.perf_counter() - began_s)
    return partial(multiply, max(1, round(20 * step_ms / took_ms)))


@contextmanager
def without_side_effects(data: Any = None) -> Iterator[None]:
    """Random state is put back, with that of the generators in ``data``; warnings of a loader or dataset appear when
    training starts, once."""
    logger = logging.getLogger(bad_samples.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        with generators.kept(data), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.disabled = before
