"""Times the first batches of an epoch with each candidate backend; planning decides.

Each candidate feeds a simulated training loop with steps as long as building one batch, at least `SHORTEST_STEP_MS`. A
step sleeps if training runs on a GPU. On a CPU it computes, since workers and step then share the cores.

The batches belong to epoch 0, also in a resumed run. They come from separate loaders, and random state is restored, so
training is not affected. Batches are not pinned, since that would start CUDA before Lightning has chosen the GPU.
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
from wellfed.data.streams.stream import Stream, copied_by
from wellfed.data.streams.stream_loader import StreamLoader
from wellfed.data.train_loader import TrainLoader

_LOG = logging.getLogger(__name__)

_BUILDS, _BUILDS_S = 8, 0.02
"""Maximum number of batches, and maximum seconds, to measure building one batch; at least one is built."""
_LOOP, _LOOP_S = 32, 0.25
"""Maximum number of steps, and maximum seconds, of one candidate's loop; at least `_FEWEST` steps."""
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
    """Returns the time of a step and its batch with each candidate; None if a batch can't be built.

    In that case training requests the same batch and reports the error, also if it exceeds the timeout of ``first``.
    Takes milliseconds for cheap batches, up to about 2 s for batches of 100 ms.

    Args:
        make: returns a loader of epoch 0, separate from the loader of training.
        candidates: returns the settings to time, given the time to build a batch with ``first``.
        on_gpu: whether a step leaves the CPU cores to the workers.
        known: earlier measurements of building one batch.
        data: the dataset, whose own generators are restored.
    """
    with without_side_effects(data):
        try:
            found = known or _build(make(first))
        except Exception as error:  # noqa: BLE001  training meets the same error and reports it
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
            except Exception as error:  # noqa: BLE001  the plan names the backend; others may work
                _LOG.info("loader.backend=%s failed while it was timed: %r", plan.backend, error)
                failed.append(plan.backend)
        return replace(found, timed=timed, failed=tuple(failed))


def copied(dataset: Any) -> Any:
    """Returns a shallow copy of a dataset, so that worker processes do not inherit a file that it opens on first use.

    Returns the dataset itself if copying fails, or if its class has ``__del__``, which may close a shared file.
    """
    if isinstance(dataset, Stream):
        return dataset.on_a_copy()
    return dataset if hasattr(type(dataset), "__del__") else copied_by(copy.copy, dataset)


def _build(loader: TrainLoader | StreamLoader) -> FirstBatches:
    """Measures the time to build a batch, and its size."""
    with closing(loader):
        deliveries = _endless(loader)
        batch = next(deliveries).batch
        size, uncut = batches.num_bytes(batch), batches.why_uncut(batch)
        del batch
        build_ms = statistics.median(_times_ms(deliveries, lambda: None, 1, _BUILDS, _BUILDS_S))
    return FirstBatches(build_ms, size, len(loader), max(SHORTEST_STEP_MS, build_ms), uncut=uncut)


def _loop(loader: TrainLoader | StreamLoader, step: Callable[[], None]) -> BackendTime:
    """Measures a step and its batch; the first batch, which includes the start of the workers, is dropped."""
    with closing(loader):
        deliveries = _endless(loader)
        next(deliveries)
        step()
        periods_ms = _times_ms(deliveries, step, _FEWEST, _LOOP, _LOOP_S)
    noise_ms = statistics.stdev(periods_ms) / len(periods_ms) ** 0.5
    return BackendTime(statistics.fmean(periods_ms), noise_ms)


def _endless(loader: TrainLoader | StreamLoader) -> Iterator[Delivery]:
    """Returns the batches of all epochs in turn."""
    return chain.from_iterable(repeat(loader))


def _times_ms(
    deliveries: Iterator[Delivery], step: Callable[[], None], fewest: int, most: int, longest_s: float
) -> list[float]:
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
    """Returns a function that simulates a step."""
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
    """Restores random state afterwards, also of generators in ``data``, and suppresses warnings.

    Training raises the same warnings later, once.
    """
    logger = logging.getLogger(bad_samples.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        with generators.kept(data), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.disabled = before
