"""Builds batches in worker processes of torch's DataLoader; reports workers that die, hang or can't send a batch."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import re
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker
from threadpoolctl import ThreadpoolController
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from wellfed.data.backends.bad_samples import too_late
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch
from wellfed.data.backends.shared_blocks import Inbox, Sender
from wellfed.data.settings import LoaderSettings
from wellfed.errors import ENDED_WORKER, KILLED_WORKER, DataError, ErrorKind, WellfedError, text_of, type_and_line
from wellfed.process import CPUS_AT_START, STOPS

_LOOK_S = 0.5
"""Maximum seconds between checks that the workers live."""
_ENDING_S = 0.2
"""Seconds for a process to end after its connection was closed."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_NO_ROOM = re.compile(r"No space left|shared memory|write to file </torch_|resize file </torch_|Cannot allocate")


class WorkerLost(WellfedError):
    """Raised if a worker process ended, or if a batch that it built was lost."""

    kind: ErrorKind = "worker"


@dataclass
class _NotSent:
    """A placeholder for a batch that a worker could not send."""

    reason: str

    def error(self, purpose: str) -> WorkerLost:
        """Returns the error for the user."""
        problem = f"A worker could not send the {purpose} batch that it has built: {self.reason}."
        if is_full := _NO_ROOM.search(self.reason) is not None:
            way_out = "/dev/shm has no room: give a container more (--shm-size=8g), or set"
        else:
            way_out = "Let the data return tensors and what pickles, allow more open files (ulimit -n 65536), or set"
        error = WorkerLost(f"{problem} {way_out} loader.backend=inline loader.num_workers=0.")
        error.kind = "worker" if is_full else "data"
        return error


class ProcessBackend:
    """A DataLoader that is sent one request a batch; persistent workers serve epoch after epoch."""

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings) -> None:
        self._builder, self._settings = builder, settings
        self._requests, self._inbox = _Requests(), Inbox()
        self._processes: list[Any] = []
        """Workers by number."""
        self._loader = self._make_loader()

    def __call__(self, requests: Iterable[BatchRequest]) -> Generator[BuiltBatch]:
        """Yields the batches of these requests, in order.

        Raises:
            DataError: a batch did not come within loader.timeout_s.
            WorkerLost: a worker ended, or could not send a batch.
        """
        self._requests.rest, self._requests.asked = iter(requests), deque()
        iterator: Any = None
        try:
            iterator = self._start()
            while (built := self._next(iterator)) is not None:
                self._requests.asked.popleft()
                yield built
        except Exception:
            # The error's traceback would keep the iterator and the workers alive.
            self._end_workers(iterator)
            self._loader = self._make_loader()
            raise
        finally:
            if not self._settings.persistent_workers:
                self._inbox.clear()

    def _next(self, iterator: Any) -> BuiltBatch | None:
        asked_at_s, timeout_s = time.monotonic(), self._settings.timeout_s
        while True:
            try:
                built: Any = next(iterator, None)
            except (RuntimeError, OSError, EOFError) as error:
                # OSError and EOFError: the batch's worker died while sending it.
                if not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker"):
                    raise self._worker_lost() or error from None
                if not str(error).startswith("DataLoader timed out"):
                    raise
                if timeout_s and time.monotonic() - asked_at_s >= timeout_s:
                    raise too_late(self._requests.asked[0], self._builder.purpose, timeout_s) from None
            else:
                if isinstance(built, _NotSent):
                    raise built.error(self._builder.purpose)
                if built is not None and isinstance(built.batch, DataError):
                    raise built.batch
                return built  # type: ignore[no-any-return]

    def _worker_lost(self) -> WorkerLost | None:
        """Returns the error of a worker that ended; None if all live."""
        for process in self._processes:
            process.join(_ENDING_S)
            if process.is_alive():
                continue
            is_by_itself = process.exitcode >= 0
            advice = ENDED_WORKER if is_by_itself else KILLED_WORKER
            error = WorkerLost(f"A loader worker {_how_it_ended(process.exitcode)}. {advice[0].upper()}{advice[1:]}")
            if is_by_itself:
                error.kind = "data"
            return error
        return None

    def _end_workers(self, iterator: Any) -> None:
        """Kills the workers of a DataLoader's iterator, and marks the iterator as ended.

        The iterator's own shutdown sets an event that workers share. A worker killed while it holds the event's lock
        would make torch wait for ever.
        """
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_ENDING_S)
        self._inbox.clear()
        if getattr(iterator, "_shutdown", True) is False:
            iterator._shutdown = True
            iterator._worker_pids_set = False
            _remove_worker_pids(id(iterator))
            if hasattr(iterator, "_pin_memory_thread_done_event"):
                iterator._pin_memory_thread_done_event.set()

    def _start(self) -> Any:
        """Returns the DataLoader's iterator. Persistent workers that do not answer are replaced.

        Raises:
            WorkerLost: processes can't share semaphores here.
        """
        if self._settings.num_workers:
            _check_semaphores()
        with _undisturbed():
            try:
                iterator = iter(self._loader)
            except RuntimeError as error:
                # Persistent workers are still busy with an abandoned pass.
                if not str(error).startswith(("DataLoader timed out", "DataLoader worker")):
                    raise
                self._end_workers(self._loader._iterator)
                self._loader = self._make_loader()
                iterator = iter(self._loader)
        self._processes = getattr(iterator, "_workers", [])
        return iterator

    def _make_loader(self) -> DataLoader[BuiltBatch]:
        settings = self._settings
        options: dict[str, Any] = {}
        if settings.num_workers:
            options = {
                "prefetch_factor": settings.prefetch_factor,
                "persistent_workers": settings.persistent_workers,
                "worker_init_fn": partial(_init_worker, self._builder, CPUS_AT_START),
                "timeout": min(_LOOK_S, settings.timeout_s or _LOOK_S),
            }
        dataset: Dataset[Any] = _InWorker(self._builder, self._inbox.number, settings.prefetch_factor or 2)
        with _undisturbed():
            multiprocessing.util.get_temp_dir()  # shared by all workers, since killed workers don't remove theirs
            return DataLoader(
                dataset,
                sampler=self._requests,
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=settings.num_workers,
                pin_memory=settings.pin_memory,
                # Seeds the workers. Else DataLoader draws from the process's generator, which would change dropout.
                generator=torch.Generator().manual_seed(self._builder.seed),
                **options,
            )


class _Requests(Sampler[BatchRequest]):
    """A sampler that yields requests, so that one DataLoader and its workers serve any part of any epoch."""

    def __init__(self) -> None:
        self.rest: Iterator[BatchRequest] = iter(())
        self.asked: deque[BatchRequest] = deque()
        """Requests without an answer so far."""

    def __iter__(self) -> Iterator[BatchRequest]:
        asked = self.asked
        for request in self.rest:
            asked.append(request)
            yield request


class _InWorker(Dataset[Any]):
    """The builder as the dataset of a DataLoader."""

    def __init__(self, builder: BatchBuilder, inbox: int, prefetch_factor: int) -> None:
        self._builder, self._sender = builder, Sender(inbox, prefetch_factor)

    def __getitem__(self, request: BatchRequest) -> Any:
        if get_worker_info() is None:
            return self._builder(request)
        try:
            built = self._builder(request)
        except DataError as error:  # DataLoader would add its own traceback
            return BuiltBatch(error)
        for one in built.lost:
            one.cause = _portable(one.cause)
        return self._sender.packed(built)


def _init_worker(builder: BatchBuilder, cpus_given: frozenset[int] | None, worker: int) -> None:
    # A forked worker inherits the training process's handlers, which end training after the step. The training process
    # ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in set(STOPS) - {signal.SIGINT, signal.SIGTERM}:  # a closed terminal signals all its processes
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # garbage collection writes to, and so copies, memory shared with the parent
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # for libraries loaded later
    if cpus_given is not None:
        try:
            threads = [int(name) for name in os.listdir("/proc/self/task")]
        except OSError:
            threads = [0]
        for thread in threads:
            os.sched_setaffinity(thread, cpus_given)
    ThreadpoolController().limit(limits=1)  # numpy's BLAS
    torch.set_num_threads(1)
    if torch_collate.default_collate_fn_map[torch.Tensor] is torch_collate.collate_tensor_fn:
        torch_collate.default_collate_fn_map[torch.Tensor] = _stacked
    # Called by the thread that sends batches. The default prints the error and drops the batch.
    multiprocessing.queues.Queue._on_queue_feeder_error = _report_unsent  # type: ignore[attr-defined]
    if builder.worker_init is not None:
        if (info := get_worker_info()) is not None:
            torch_worker._worker_info = replace(info, dataset=builder.dataset)  # read by a user's worker_init
        builder.worker_init(worker)


def _check_semaphores() -> None:
    """Raises `WorkerLost` if no semaphore can be made. torch would fail later, and complain of a half-made iterator."""
    try:
        multiprocessing.Lock()
    except OSError as error:  # semaphores are files in /dev/shm
        raise WorkerLost(
            f"Workers can't be started: {error.strerror or error}. Processes need /dev/shm, with room and the right to "
            "write there. Set loader.backend=inline loader.num_workers=0, or mount it (--shm-size=8g)."
        ) from error


def _stacked(samples: list[torch.Tensor], **options: Any) -> Any:
    """Collates tensors as torch does, but into memory of this worker: new shared memory takes ten times as long."""
    if samples[0].layout is not torch.strided or samples[0].is_nested:  # refused by torch
        return torch_collate.collate_tensor_fn(samples, **options)
    return torch.stack(samples)


def _unchanged(built: Any) -> Any:
    return built


def _portable(error: BaseException | None) -> BaseException | None:
    """Returns an exception that can be sent to the training process, with the worker's traceback as a note."""
    if error is None:
        return None
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        copy: object = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever a user's exception does when it is pickled
        copy = None
    own = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    portable = copy if isinstance(copy, BaseException) else own  # __reduce__ may return anything
    portable.add_note(f"In the worker process:\n{text}")
    return portable


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"process ended by itself with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"process was killed by {names.get(-code, f'signal {-code}')}"


def _report_unsent(results: Any, error: Exception, sent: Any) -> None:
    """Sends a `_NotSent` instead of the batch, since the training process would wait for it for ever."""
    number, _ = sent
    results.put((number, _NotSent(type_and_line(error))))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Suppresses DataLoader's warning about more workers than CPUs, and its handler of SIGCHLD.

    The plan warns with a better number. The handler would raise in the middle of a step when a worker dies. Without it,
    the error appears when the batch is requested.
    """
    has_signal = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if has_signal else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)
