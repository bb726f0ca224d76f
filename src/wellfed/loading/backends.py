"""Who builds the batches: the training process itself, threads, or processes. Order is the caller's, always.

A backend maps keys to batches: it is given the keys of the coming batches and yields their batches in that order,
building up to ``num_workers * prefetch_factor`` of them ahead.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from wellfed.contract import Batch
from wellfed.errors import DataError
from wellfed.loading import batches
from wellfed.sample_rng import SampleRng, mix

BackendName = Literal["torch", "inline", "threads", "processes"]
Key = tuple[int, int]
"""(epoch, batch)"""


@dataclass(frozen=True)
class LoaderPlan:
    """How batches are built; every field is decided."""

    backend: BackendName = "inline"
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout_s: int = 0
    worker_threads: int | None = None


def inline(build: Callable[[Key], Batch], keys: Iterable[Key], plan: LoaderPlan) -> Iterator[Batch]:
    """Each batch is built when it is asked for."""
    for key in keys:
        batch = build(key)
        yield batches.pin(batch) if plan.pin_memory else batch


def threads(build: Callable[[Key], Batch], keys: Iterable[Key], plan: LoaderPlan) -> Iterator[Batch]:
    """Threads build ahead; for data whose ``fetch`` spends its time in torch or IO, which release the GIL."""

    def work(key: Key) -> Batch:
        batch = build(key)
        return batches.pin(batch) if plan.pin_memory else batch

    waiting = iter(keys)
    ahead: deque[Future[Batch]] = deque()
    pool = ThreadPoolExecutor(plan.num_workers, thread_name_prefix="wellfed-loader")
    try:
        for key in waiting:
            ahead.append(pool.submit(work, key))
            if len(ahead) < plan.num_workers * (plan.prefetch_factor or 2):
                continue
            yield _result(ahead.popleft(), plan.timeout_s)
        while ahead:
            yield _result(ahead.popleft(), plan.timeout_s)
    finally:
        # A stuck producer must not keep the run from ending.
        pool.shutdown(wait=False, cancel_futures=True)


def _result(future: Future[Batch], timeout_s: int) -> Batch:
    try:
        return future.result(timeout_s or None)
    except FutureTimeout:
        if future.done():  # the producer itself raised a TimeoutError
            raise
        raise DataError(
            f"No batch came within loader.timeout_s={timeout_s} s: a producer thread is stuck or too slow. "
            "Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline to see where it hangs."
        ) from None


class ProcessBackend:
    """torch's DataLoader worker processes, one message a batch; kept from epoch to epoch where persistent."""

    def __init__(self, dataset: Dataset[Batch], plan: LoaderPlan, *, by_item: bool, collate: Any = None) -> None:
        self._keys = _Keys()
        options: dict[str, Any] = {}
        if plan.num_workers:
            options = {
                "prefetch_factor": plan.prefetch_factor,
                "persistent_workers": plan.persistent_workers,
                "worker_init_fn": _WorkerInit(plan.worker_threads),
            }
        order: dict[str, Any] = (
            {"batch_sampler": self._keys, "collate_fn": collate}
            if by_item
            else {"sampler": self._keys, "batch_size": None, "collate_fn": _identity}
        )
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            timeout=plan.timeout_s if plan.num_workers else 0,
            **order,
            **options,
        )

    def __call__(self, keys: Iterable[Any]) -> Iterator[Batch]:
        """Batches for these keys; a key is what the dataset's ``__getitem__`` takes (a list of them by item)."""
        self._keys.keys = keys
        return iter(self._loader)


class _Keys(Sampler[Any]):
    """Lets one DataLoader, and so its live workers, serve any stretch of any epoch."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


@dataclass(frozen=True)
class _WorkerInit:
    worker_threads: int | None

    def __call__(self, worker: int) -> None:
        if self.worker_threads is not None:
            torch.set_num_threads(self.worker_threads)


def _identity(batch: Batch) -> Batch:
    return batch


def seed_everything(seed: int, epoch: int, index: int) -> None:
    """Seed python, numpy and torch for one sample, for datasets that draw from the global generators."""
    value = mix(seed, epoch, index)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002
    torch.manual_seed(value)


class ItemBuilder:
    """Builds a sample from ``dataset[i]``; randomness is a function of (seed, epoch, index)."""

    def __init__(self, dataset: Any, seed: int, *, takes_rng: bool) -> None:
        self._dataset, self._seed, self._takes_rng = dataset, seed, takes_rng

    def __getitem__(self, key: Key) -> Any:
        """The sample for (epoch, index)."""
        epoch, index = key
        try:
            if self._takes_rng:
                return self._dataset.__getitem__(index, SampleRng(self._seed, epoch, index))
            with torch.random.fork_rng(devices=[]):
                state = random.getstate(), np.random.get_state()  # noqa: NPY002
                seed_everything(self._seed, epoch, index)
                try:
                    return self._dataset[index]
                finally:
                    random.setstate(state[0])
                    np.random.set_state(state[1])  # noqa: NPY002
        except Exception as cause:
            cause.add_note(f"while loading training sample {index} (epoch {epoch})")
            raise
