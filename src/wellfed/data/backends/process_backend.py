"""Builds batches in worker processes of torch's DataLoader; reports workers that die, hang or can't send a batch."""

from __future__ import annotations

import gc
import io
import logging
import math
import multiprocessing.util
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.data._utils.collate as torch_collate
from threadpoolctl import ThreadpoolController
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset, Sampler

from wellfed import generators
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LateBatch
from wellfed.data.backends.shared_blocks import Inbox, Sender
from wellfed.data.settings import LoaderSettings
from wellfed.errors import KILLED_WORKER, DataError, ErrorKind, WellfedError, first_line, type_and_line
from wellfed.process import CPUS_AT_START, STOPS

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.5
"""Maximum seconds between checks that the workers live."""
_ENDING_S = 0.2
"""Seconds for a process to end after its connection was closed."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class WorkerLost(WellfedError):
    """Raised if a worker process has ended."""

    kind: ErrorKind = "worker"


class ProcessBackend:
    """A DataLoader that is sent one request a batch; persistent workers serve epoch after epoch."""

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings) -> None:
        self._builder, self._settings = builder, settings
        self._requests, self._inbox = _Requests(), Inbox()
        self._iterator: Any = None
        self._state_of_data: list[Any] | None = None
        """State of the dataset that persistent workers have a copy of."""
        self._loader = self._make_loader()
        _warn_of_files(builder.dataset)

    def __call__(self, requests: Iterator[BatchRequest]) -> Generator[BuiltBatch]:
        """Yields the batches of these requests, in order.

        Raises:
            DataError: a batch could not be built or sent.
            LateBatch: a batch did not come within loader.timeout_s.
            WorkerLost: a worker has ended.
        """
        self._requests.rest = requests
        try:
            self._start()
            while (built := self._next()) is not None:
                if isinstance(built.batch, WellfedError):
                    raise built.batch
                yield built
        except Exception:
            self._end_workers()  # also of an iterator that the error's traceback keeps alive
            raise
        finally:
            if not self._settings.persistent_workers:
                self._iterator = None
                self._inbox.clear()

    def _start(self) -> None:
        if self._settings.persistent_workers:
            state = self._builder.state_of_data()
            if self._iterator is not None and state != self._state_of_data:  # changed, as by a hook between epochs
                _LOG.info("%s was changed: its workers are started anew.", type(self._builder.dataset).__name__)
                self._end_workers()
            self._state_of_data = state
        with _undisturbed():
            try:
                self._iterator = iter(self._loader)
            except RuntimeError:  # persistent workers are still busy with an abandoned pass
                self._end_workers()
                self._iterator = iter(self._loader)

    def _next(self) -> BuiltBatch | None:
        until_s = time.monotonic() + (self._settings.timeout_s or math.inf)
        while True:
            try:
                return next(self._iterator, None)
            except (RuntimeError, OSError, EOFError) as error:  # OSError and EOFError: a worker died while sending
                if str(error).startswith("DataLoader timed out"):
                    if time.monotonic() >= until_s:
                        raise LateBatch from None
                    continue
                for process in getattr(self._iterator, "_workers", []):
                    process.join(_ENDING_S)
                    if process.exitcode is not None:
                        problem = f"A loader worker process ended ({first_line(error)}), {KILLED_WORKER}"
                        raise WorkerLost(problem) from None
                raise

    def _end_workers(self) -> None:
        """Kills the workers and makes a new DataLoader.

        The iterator's own shutdown waits up to 5 s for each worker, and for ever for a lock that a killed worker held.
        """
        iterator, self._iterator = self._iterator, None
        for process in getattr(iterator, "_workers", []):
            process.kill()
            process.join(_ENDING_S)
        if getattr(iterator, "_shutdown", True) is False:
            iterator._shutdown, iterator._worker_pids_set = True, False
            _remove_worker_pids(id(iterator))
            if hasattr(iterator, "_pin_memory_thread_done_event"):
                iterator._pin_memory_thread_done_event.set()
        self._inbox.clear()
        self._loader = self._make_loader()

    def _make_loader(self) -> DataLoader[BuiltBatch]:
        settings = self._settings
        dataset: Dataset[Any] = _InWorker(self._builder, self._inbox.number, settings.prefetch_factor or 2)
        with _undisturbed():
            multiprocessing.util.get_temp_dir()  # shared by all workers, since killed workers don't remove theirs
            return DataLoader(
                dataset,
                sampler=self._requests,
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=settings.num_workers,
                prefetch_factor=settings.prefetch_factor,
                persistent_workers=settings.persistent_workers,
                pin_memory=settings.pin_memory,
                timeout=min(_LOOK_S, settings.timeout_s or _LOOK_S),
                worker_init_fn=partial(_init_worker, CPUS_AT_START),
                # Seeds the workers. Else DataLoader draws from the process's generator, which would change dropout.
                generator=torch.Generator().manual_seed(self._builder.seed),
            )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Suppresses DataLoader's warning about more workers than CPUs, and its handler of SIGCHLD.

    The plan warns with a better number. The handler would raise in the middle of a step when a worker dies, also when
    a scheduler ends all processes of a run. Without it, the error appears when the batch is requested.
    """
    has_signal = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if has_signal else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


def _warn_of_files(dataset: Any) -> None:
    """Warns of an open file that forked workers share with each other."""
    for each in generators.reached_from(dataset):
        if isinstance(each, (io.BufferedReader, io.TextIOWrapper)) and not each.closed and each.readable():
            _LOG.warning(
                "%s holds the open file %s, which worker processes share: a read of one moves the position of all. "
                "Open it where it is first used, in each process.", type(dataset).__name__, each.name,
            )  # fmt: skip
            return


class _Requests(Sampler[BatchRequest]):
    """A sampler that yields requests, so that one DataLoader and its workers serve any part of any epoch."""

    def __init__(self) -> None:
        self.rest: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.rest


class _InWorker(Dataset[Any]):
    """The builder as the dataset of a DataLoader."""

    def __init__(self, builder: BatchBuilder, inbox: int, prefetch_factor: int) -> None:
        self._builder, self._sender = builder, Sender(inbox, prefetch_factor)

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            built = self._builder(request)
        except WellfedError as error:  # DataLoader would add its own traceback
            return BuiltBatch(error)
        for one in built.lost:  # its cause may not pickle
            assert one.cause is not None
            one.cause = RuntimeError(
                "In the worker process:\n" + "".join(traceback.format_exception(one.cause)).rstrip()
            )
        try:
            return self._sender.packed(built)
        except Exception as error:  # noqa: BLE001  whatever can't be pickled raises
            problem = f"A worker could not send the batch that it has built: {type_and_line(error)}."
            way_out = "Let the data return tensors and what pickles, or set loader.backend=inline loader.num_workers=0."
            return BuiltBatch(DataError(f"{problem} {way_out}"))


def _init_worker(cpus_given: frozenset[int] | None, worker: int) -> None:
    # A forked worker inherits the training process's handlers, which end training after the step. The training process
    # ends its workers itself, also when a closed terminal signals all its processes.
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    gc.freeze()  # garbage collection writes to, and so copies, memory shared with the parent
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # for libraries loaded later
    if cpus_given is not None:
        tasks = Path("/proc/self/task")
        for thread in (int(each.name) for each in tasks.iterdir()) if tasks.is_dir() else (0,):
            os.sched_setaffinity(thread, cpus_given)
    ThreadpoolController().limit(limits=1)  # numpy's BLAS
    torch.set_num_threads(1)
    if torch_collate.default_collate_fn_map[torch.Tensor] is torch_collate.collate_tensor_fn:
        torch_collate.default_collate_fn_map[torch.Tensor] = _stacked


def _stacked(samples: list[torch.Tensor], **options: Any) -> Any:
    """Collates tensors as torch does, but into memory of this worker: new shared memory takes ten times as long."""
    if samples[0].layout is not torch.strided or samples[0].is_nested:  # refused by torch
        return torch_collate.collate_tensor_fn(samples, **options)
    return torch.stack(samples)


def _unchanged(built: Any) -> Any:
    return built
