"""Times the first batches of an epoch with each candidate backend beside steps of the model; planning decides.

If the model can't step before training, a stand-in sleeps for as long as building one batch takes, at least for
`SHORTEST_STEP_MS`.

The batches belong to epoch 0, also in a resumed run. They come from separate loaders, and random state is restored, so
training is not affected. Batches are not pinned, since that would start CUDA before the GPU is chosen.
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
from itertools import chain, cycle, islice, repeat
from typing import Any

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.data.own_loader import OwnLoader
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import TrainLoader

_LOG = logging.getLogger(__name__)
Loader = TrainLoader | OwnLoader
Make = Callable[[LoaderSettings], Loader]
"""Returns a loader of epoch 0, separate from the loader of training."""

SHORTEST_STEP_MS = 1.0
"""Milliseconds of the shortest stand-in step; real steps are hardly ever shorter."""
_FEW, _BUILDS_S, _STEPS_S = 8, 0.02, 0.3
"""Maximum number of first batches and of steps looked at alone, and maximum seconds of each; at least one is timed."""
_LOOP, _FEWEST, _LOOP_S = 32, 4, 0.3
"""Maximum and minimum number of steps of one pass of a candidate's loop, and maximum seconds."""
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
        with without_side_effects(data), closing(make(first)) as loader:
            deliveries = _endless(loader)
            num_bytes = batches.num_bytes(next(deliveries).batch)
            takes: list[Any] = []
            build_ms = statistics.median(_times_ms(lambda: takes.append(next(deliveries).took), _FEW, _BUILDS_S))
            cpu_ms = [took.cpu_ms for took in takes if took is not None]
            cpu = statistics.median(cpu_ms) if cpu_ms else None
            return FirstBatches(build_ms, num_bytes, len(loader), build_cpu_ms=cpu)
    except Exception as error:  # noqa: BLE001  training meets the same error and reports it
        _LOG.info("no batch could be built to time loader backends: %r", error)
        return None


def time_step(
    make: Make, first: LoaderSettings, found: FirstBatches, step: TrialStep, data: Any = None
) -> FirstBatches:
    """Returns ``found`` with the time of a step on the first batches, once the step is warm."""
    with without_side_effects(data), closing(make(first)) as loader:
        few = [delivery.batch for delivery in islice(_endless(loader), 2)]
        turns = cycle(few)

        def one_step() -> None:
            step.run(next(turns))
            step.wait()

        for _ in few:  # the first steps allocate, and choose kernels
            one_step()
        return replace(found, step_ms=statistics.mean(_times_ms(one_step, _FEW, _STEPS_S)))


def time_backends(
    make: Make,
    plans: Sequence[LoaderSettings],
    found: FirstBatches,
    step: TrialStep | None,
    data: Any = None,
) -> FirstBatches:
    """Returns ``found`` with the time of a step and its batch with each candidate.

    Takes milliseconds for cheap batches, up to about 3 s for batches of 100 ms.

    Args:
        plans: the settings to time.
        step: a warm step; None = one that sleeps.
    """
    stand_in_s = max(SHORTEST_STEP_MS, found.build_ms) / 1000
    step = step or TrialStep(lambda batch: time.sleep(stand_in_s), lambda: None)
    timed: dict[str, float] = {}
    failed: list[str] = []
    for plan in list(plans) * _PASSES:
        if plan.backend in failed:
            continue
        try:
            with without_side_effects(data):
                period_ms = _loop(make(replace(plan, pin_memory=False)), step, plan.num_workers)
            timed[plan.backend] = min(period_ms, timed.get(plan.backend, math.inf))
        except Exception as error:  # noqa: BLE001  the plan names the backend; others may work
            _LOG.info("loader.backend=%s failed while it was timed: %r", plan.backend, error)
            failed.append(plan.backend)
            timed.pop(plan.backend, None)
    return replace(found, timed=timed, failed=tuple(failed))


def longest_batch(deliveries: Iterator[Delivery]) -> Batch:
    """Returns the batch with the most bytes per sample of the first ones: tokens and their mask grow together."""
    return max(islice(deliveries, _FEW), key=lambda one: batches.num_bytes(one.batch) / one.total).batch


def copied(dataset: Any) -> Any:
    """Returns a shallow copy of a dataset, so that worker processes do not inherit a file that it opens on first use.

    Returns the dataset itself if copying fails, or if its class has ``__del__``, which may close a shared file.
    """
    try:
        return dataset if hasattr(type(dataset), "__del__") else copy.copy(dataset)
    except Exception:  # noqa: BLE001  a dataset that can't be copied is shared
        return dataset


def _times_ms(run: Callable[[], Any], most: int, most_s: float, fewest: int = 1) -> list[float]:
    """Returns the milliseconds of each call."""
    times_ms: list[float] = []
    while len(times_ms) < fewest or (len(times_ms) < most and sum(times_ms) < 1000 * most_s):
        began_s = time.perf_counter()
        run()
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return times_ms


def _loop(loader: Loader, step: TrialStep, workers: int) -> float:
    """Returns the milliseconds of a step and its batch.

    Workers start with a batch each, and go on finishing one each at about the same time. So the first of each worker
    are not counted, and then whole rounds.
    """
    in_round = max(1, workers)
    with closing(loader):
        deliveries = _endless(loader)

        def one_round() -> None:
            for _ in range(in_round):
                step.run(next(deliveries).batch)

        one_round()
        step.wait()
        began_s = time.perf_counter()
        rounds = _times_ms(one_round, math.ceil(_LOOP / in_round), _LOOP_S, fewest=math.ceil(_FEWEST / in_round))
        step.wait()
        return 1000 * (time.perf_counter() - began_s) / (in_round * len(rounds))


def _endless(loader: Loader) -> Iterator[Delivery]:
    """Returns the batches of all epochs in turn."""
    return chain.from_iterable(repeat(loader))


@contextmanager
def without_side_effects(data: Any = None) -> Iterator[None]:
    """Restores random state afterwards, also of generators in ``data``. Suppresses warnings and the log.

    Training raises the same warnings later, once.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with generators.kept(data), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
