"""Who builds the batches: the training process itself, threads (`threads`) or processes (`processes`).

A backend is given the requests of the coming batches and yields their batches in that order, building up to
``num_workers * prefetch_factor`` of them ahead. What is said of producers that hang holds for threads and processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from wellfed.errors import DataError
from wellfed.loading.bisect import culprits
from wellfed.loading.builder import BatchBuilder
from wellfed.loading.heartbeats import Doing
from wellfed.loading.requests import Built, Request

_LOG = logging.getLogger(__name__)
Trouble = TypeVar("Trouble")
BackendName = Literal["torch", "inline", "threads", "processes"]


@dataclass(frozen=True)
class LoaderPlan:
    """How batches are built; every field is decided."""

    backend: BackendName = "inline"
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout_s: float = 0
    searches: bool = True
    """Whether the sample that a producer hangs at is looked for, which takes several timeouts."""
    worker_threads: int | None = None
    """Threads of torch and numpy in each worker process; None = 1. A producer thread always has itself alone."""


def inline(builder: BatchBuilder, requests: Iterable[Request], plan: LoaderPlan) -> Generator[Built]:
    """Each batch is built when it is asked for."""
    for request in requests:
        built = builder(request)
        yield built.pin_memory() if plan.pin_memory else built


def is_stuck(doing: Doing, request: Request, timeout_s: float) -> bool:
    """Whether a producer hangs at this request. One that began with its sample a moment ago is slow, not stuck."""
    is_here = (doing.epoch, doing.batch) == (request.epoch, request.batch)
    return is_here and doing.for_s >= timeout_s / 2


def search(request: Request, what: str, known: Trouble, trouble: Callable[[Request], Trouble | None]) -> int:
    """The first index that hangs, or kills, where the data was asked for a whole batch at once.

    Args:
        what: the batch is for: training, evaluation.

    Raises:
        Innocent: every sample can be had alone.
    """
    _LOG.warning(
        "%s batch %d of epoch %d never came: looking for the one of its %d samples that is at fault.",
        what.capitalize(), request.batch, request.epoch, len(request.indices),
    )  # fmt: skip
    return culprits(request.indices, known, lambda part: trouble(request.only(part)), most=1)[0][0]


def hung(timeout_s: float) -> str:
    """The reason of a sample that hangs."""
    return f"it did not come within loader.timeout_s={timeout_s:g}"


def too_late(timeout_s: float) -> DataError:
    """The error of a batch that is late without any sample hanging."""
    return DataError(
        f"No batch came within loader.timeout_s={timeout_s:g} s: a producer is stuck or too slow. "
        "Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline to see where it hangs."
    )
