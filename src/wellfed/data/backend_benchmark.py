"""Times the first batches of an epoch with each candidate backend beside steps of the model; planning decides.

If the model can't step before training, a stand-in step takes as long as building one batch, at least
`SHORTEST_STEP_MS`. It sleeps if training runs on a GPU. On a CPU it computes, since workers and step then share the
cores.

The batches belong to epoch 0, also in a resumed run. They come from separate loaders, and random state is restored, so
training is not affected. Batches are not pinned, since that would start CUDA before Lightning has chosen the GPU.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any

import torch

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.data.backends import bad_samples, process_backend
from wellfed.data.backends.first_batches import BackendTime, FirstBatches
from wellfed.data.own_loader import OwnLoader
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import TrainLoader

_LOG = logging.getLogger(__name__)
Make = Callable[[LoaderSettings], TrainLoader | OwnLoader]
"""Returns a loader of epoch 0, separate from the loader of training."""

SHORTEST_STEP_MS = 1.0
"""Milliseconds of the shortest stand-in step; real steps are hardly ever shorter."""
_BUILDS, _BUILDS_S = 8, 0.02
"""Maximum number of batches, and maximum seconds, to measure building one batch; at least one is built."""
_STEPS, _STEPS_S = 8, 0.3
"""Maximum number of warm steps, and maximum seconds, to measure a step; at least two are run."""
_LOOP, _LOOP_S = 32, 0.3
"""Maximum number of steps, and maximum seconds, of one pass of a candidate's loop."""
_FEWEST = 4
"""Minimum number of steps of a pass."""
_PASSES = 2
"""Passes of each candidate, in turns. The fastest counts, since other programs only slow a pass down."""


@dataclass(frozen=True)
class TrialStep:
    """A step of a copy of the model."""

    run: Callable[[Any], None]
    """Runs the step on a batch; may return before a GPU has finished."""
    wait: Callable[[], None]
    """Blocks until the device has finished."""


def build_first_batches(make: Make, first: LoaderSettings, data: Any = None) -> FirstBatches | None:
    """Measures the time to build a batch, and its size; None if it can't be built.

    In that case training requests the same batch and reports the error, also if it exceeds the timeout of ``first``.

    Args:
        data: the dataset, whose own generators are restored.
    """
    try:
        with without_side_effects(data):
            return _build(make(first), is_here=not first.num_workers)
    except Exception as error:  # noqa: BLE001  training meets the same error and reports it
        _LOG.info("no batch could be built to time loader backends: %r", error)
        return None


def time_step(
    make: Make, first: LoaderSettings, found: FirstBatches, step: TrialStep, data: Any = None
) -> FirstBatches:
    """Returns ``found`` with the time of a step on the first batches, once the step is warm."""
    few: list[Any] = []

    def steps(number: int) -> tuple[float, float]:
        """Returns seconds and CPU seconds of a step."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for place in range(number):
            step.run(few[place % len(few)])
            step.wait()
        return (time.perf_counter() - began_s) / number, (time.process_time() - began_cpu_s) / number

    with without_side_effects(data), closing(make(first)) as loader:
        few += [delivery.batch for delivery in islice(_endless(loader), 2)]
        steps(len(few))  # the first steps allocate, and choose kernels
        step_s, cpu_s = steps(1)
        if step_s < _STEPS_S / 2:  # a slow step is measured no longer than needed
            step_s, cpu_s = steps(min(_STEPS, max(2, int(_STEPS_S / step_s))))
    return replace(found, step_ms=1000 * step_s, step_cpu_ms=1000 * cpu_s)


def time_backends(
    make: Make,
    plans: Sequence[LoaderSettings],
    found: FirstBatches,
    step: TrialStep | None,
    *,
    on_gpu: bool,
    data: Any = None,
) -> FirstBatches:
    """Returns ``found`` with the time of a step and its batch with each candidate.

    Takes milliseconds for cheap batches, up to about 3 s for batches of 100 ms.

    Args:
        plans: the settings to time.
        step: a warm step; None = one that only takes time.
        on_gpu: whether a step leaves the CPU cores to the workers.
    """
    if not plans:
        return found
    step = step or _stand_in(max(SHORTEST_STEP_MS, found.build_ms), on_gpu=on_gpu)
    timed: dict[str, BackendTime] = {}
    failed: list[str] = []
    with without_side_effects(data):
        for plan in list(plans) * _PASSES:
            if plan.backend in failed:
                continue
            try:
                period_ms = _loop(make(replace(plan, pin_memory=False)), step, plan.num_workers)
            except Exception as error:  # noqa: BLE001  the plan names the backend; others may work
                _LOG.info("loader.backend=%s failed while it was timed: %r", plan.backend, error)
                failed.append(plan.backend)
                timed.pop(plan.backend, None)
                continue
            before_ms = timed[plan.backend].period_ms if plan.backend in timed else math.inf
            timed[plan.backend] = BackendTime(min(period_ms, before_ms), plan.num_workers)
    return replace(found, timed=timed, failed=tuple(failed))


def copied(dataset: Any) -> Any:
    """Returns a shallow copy of a dataset, so that worker processes do not inherit a file that it opens on first use.

    Returns the dataset itself if copying fails, or if its class has ``__del__``, which may close a shared file.
    """
    if hasattr(type(dataset), "__del__"):
        return dataset
    try:
        return copy.copy(dataset)
    except Exception:  # noqa: BLE001  a dataset that can't be copied is shared
        return dataset


def _build(loader: TrainLoader | OwnLoader, *, is_here: bool) -> FirstBatches:
    with closing(loader):
        deliveries = _endless(loader)
        batch = next(deliveries).batch
        size = batches.num_bytes(batch)
        del batch
        times_ms: list[float] = []
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        while not times_ms or (len(times_ms) < _BUILDS and sum(times_ms) < 1000 * _BUILDS_S):
            next(deliveries)
            times_ms.append(1000 * (time.perf_counter() - began_s) - sum(times_ms))
        cpu_frac = (time.process_time() - began_cpu_s) / max(sum(times_ms) / 1000, 1e-9)
        build_ms = statistics.median(times_ms)
        build_cpu_ms = build_ms * min(1.0, cpu_frac) if is_here else None
        return FirstBatches(build_ms, size, len(loader), build_cpu_ms=build_cpu_ms)


def _loop(loader: TrainLoader | OwnLoader, step: TrialStep, workers: int) -> float:
    """Returns the milliseconds of a step and its batch.

    Workers start with a batch each, and go on finishing one each at about the same time. So the first of each worker
    are not counted, and then whole rounds.
    """
    in_round = max(1, workers)
    with closing(loader):
        deliveries = _endless(loader)
        for _ in range(in_round):
            step.run(next(deliveries).batch)
        step.wait()
        count, began_s = 0, time.perf_counter()
        while count < _FEWEST or (count < _LOOP and time.perf_counter() - began_s < _LOOP_S):
            for _ in range(in_round):
                step.run(next(deliveries).batch)
            count += in_round
        step.wait()
        return 1000 * (time.perf_counter() - began_s) / count


def _endless(loader: TrainLoader | OwnLoader) -> Iterator[Delivery]:
    """Returns the batches of all epochs in turn."""
    return chain.from_iterable(repeat(loader))


def _stand_in(step_ms: float, *, on_gpu: bool) -> TrialStep:
    """Returns a step that takes time, and on a CPU the cores."""
    if on_gpu:
        return TrialStep(lambda _: time.sleep(step_ms / 1000), lambda: None)
    left, right, out = (torch.ones(128, 128) for _ in range(3))

    def work(_: Any) -> None:
        until_s = time.thread_time() + step_ms / 1000  # takes longer if workers need the cores
        while time.thread_time() < until_s:
            torch.mm(left, right, out=out)

    return TrialStep(work, lambda: None)


@contextmanager
def without_side_effects(data: Any = None) -> Iterator[None]:
    """Restores random state afterwards, also of generators in ``data``, and suppresses warnings.

    Training raises the same warnings later, once.
    """
    loggers = [logging.getLogger(module.__name__) for module in (bad_samples, process_backend)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with generators.kept(data), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled
