"""Who builds the batches: the training process itself, threads, or processes. Order is the caller's, always.

A backend maps keys to batches: it is given the keys of the coming batches and yields their batches in that order,
building up to ``num_workers * prefetch_factor`` of them ahead.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
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
_STOP_S = 2.0
"""Longest wait for producers that have been told to stop."""


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
    """torch threads in each worker process. Producer threads share the process's: torch's own count is by thread, but
    MKL's is not, so that setting it in one would slow down the training thread."""


def inline(build: Callable[[Key], Batch], keys: Iterable[Key], plan: LoaderPlan) -> Generator[Batch]:
    """Each batch is built when it is asked for."""
    for key in keys:
        batch = build(key)
        yield batches.pin(batch) if plan.pin_memory else batch


def threads(build: Callable[[Key], Batch], keys: Iterable[Key], plan: LoaderPlan) -> Generator[Batch]:
    """Threads build ahead; for data whose ``fetch`` spends its time in torch or IO, which release the GIL."""

    def work(key: Key) -> Batch:
        batch = build(key)
        return batches.pin(batch) if plan.pin_memory else batch

    ahead: deque[Future[Batch]] = deque()
    producers = _Producers(work, plan.num_workers)
    try:
        for key in keys:
            ahead.append(producers.submit(key))
            if len(ahead) < plan.num_workers * (plan.prefetch_factor or 2):
                continue
            yield _result(ahead.popleft(), plan.timeout_s)
        while ahead:
            yield _result(ahead.popleft(), plan.timeout_s)
    finally:
        producers.stop()


class _Producers:
    """Threads that may be left behind: Python waits at its exit for those of a ThreadPoolExecutor, also for a stuck
    one."""

    def __init__(self, work: Callable[[Key], Batch], num_threads: int) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[tuple[Future[Batch], Key] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._produce, name=f"wellfed-loader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Key) -> Future[Batch]:
        """The batch of this key, when it is built."""
        future: Future[Batch] = Future()
        self._jobs.put((future, key))
        return future

    def stop(self) -> None:
        """Build nothing more; waits a moment for the batches in hand, so that nothing runs beside what comes next."""
        self._is_stopped = True
        for _ in self._threads:
            self._jobs.put(None)
        until_s = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _produce(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, key = job
            if self._is_stopped:
                continue
            try:
                future.set_result(self._work(key))
            except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                future.set_exception(error)


def _result(future: Future[Batch], timeout_s: int) -> Batch:
    try:
        return future.result(timeout_s or None)
    except FutureTimeout:
        if future.done():  # the producer itself raised a TimeoutError
            raise
        raise _too_late(timeout_s) from None


def _too_late(timeout_s: int) -> DataError:
    return DataError(
        f"No batch came within loader.timeout_s={timeout_s} s: a producer is stuck or too slow. "
        "Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline to see where it hangs."
    )


class ProcessBackend:
    """torch's DataLoader worker processes, one message a batch; kept from epoch to epoch where persistent."""

    def __init__(
        self, dataset: Dataset[Batch], plan: LoaderPlan, *, by_item: bool, collate: Callable[[list[Any]], Batch]
    ) -> None:
        self._keys = _Keys()
        options: dict[str, Any] = {}
        if plan.num_workers:
            options = {
                "prefetch_factor": plan.prefetch_factor,
                "persistent_workers": plan.persistent_workers,
                "worker_init_fn": _WorkerInit(plan.worker_threads),
            }
        order: dict[str, Any] = (
            {"batch_sampler": self._keys, "collate_fn": _Sealing(collate)}
            if by_item
            else {"sampler": self._keys, "batch_size": None, "collate_fn": _Sealed}
        )
        self._timeout_s = plan.timeout_s
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            timeout=plan.timeout_s if plan.num_workers else 0,
            **order,
            **options,
        )

    def __call__(self, keys: Iterable[Any]) -> Generator[Batch]:
        """Batches for these keys; a key is what the dataset's ``__getitem__`` takes (a list of them by item)."""
        self._keys.keys = keys
        try:
            for sealed in self._loader:
                yield sealed.batch
        except RuntimeError as error:
            if str(error).startswith("DataLoader timed out"):
                raise _too_late(self._timeout_s) from error
            raise


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


@dataclass(frozen=True)
class _Sealed:
    """A batch as it goes through DataLoader, which pins what has `pin_memory` and would leave a dataclass unpinned."""

    batch: Batch

    def pin_memory(self) -> _Sealed:
        return _Sealed(batches.pin(self.batch))


@dataclass(frozen=True)
class _Sealing:
    collate: Callable[[list[Any]], Batch]

    def __call__(self, samples: list[Any]) -> _Sealed:
        return _Sealed(self.collate(samples))


def seed_everything(seed: int, epoch: int, index: int) -> None:
    """Seed python, numpy and torch for one sample, for datasets that draw from the global generators."""
    value = mix(seed, epoch, index)
    random.seed(value)
    np.random.seed(value % 2**32)
    # Not torch.manual_seed: it seeds the GPUs too, and dropout there must not start again with each sample.
    torch.default_generator.manual_seed(value)


class ItemBuilder:
    """Builds a sample from ``dataset[i]``; randomness is a function of (seed, epoch, index)."""

    def __init__(self, dataset: Any, seed: int, *, takes_rng: bool, what: str = "training") -> None:
        self._dataset, self._seed, self._takes_rng, self._what = dataset, seed, takes_rng, what

    def __getitem__(self, key: Key) -> Any:
        """The sample for (epoch, index)."""
        epoch, index = key
        try:
            if self._takes_rng:
                return self._dataset.__getitem__(index, SampleRng(self._seed, epoch, index))
            with torch.random.fork_rng(devices=[]):
                state = random.getstate(), np.random.get_state()
                seed_everything(self._seed, epoch, index)
                try:
                    return self._dataset[index]
                finally:
                    random.setstate(state[0])
                    np.random.set_state(state[1])
        except Exception as cause:
            cause.add_note(f"while loading {self._what} sample {index} (epoch {epoch})")
            raise
