"""Reads the parts of a stream and builds its batches, wherever this runs: one reader a part, asked in turn."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from wellfed import batches, generators
from wellfed.contract import Batch
from wellfed.data.backends.batch_builder import BatchBuilder, ExitInData, Stopwatch, collate_fault, is_of_the_machine
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LostSample
from wellfed.data.backends.heartbeats import Heartbeat
from wellfed.data.streams.stream import PartOf, Stream, as_worker, has_states
from wellfed.errors import reason_of
from wellfed.sample_rng import seed_from

_UNREAD = Heartbeat()
_LOOK_S = 0.05
"""How often a thread that waits for its turn looks whether it is still wanted."""
_END = object()


@dataclass(frozen=True)
class PartStart:
    """Where the reading of a part begins."""

    index: int
    count: int
    """Of the parts of all ranks."""
    epoch: int
    """That the order is of."""
    shuffle_buffer: int
    is_alone: bool
    """Its reader has no other."""
    state: Any = None
    """Of the data set, where it was left; None = at its start."""


@dataclass(slots=True)
class StreamRequest(BatchRequest):
    """The next batch of a part. Whoever reads the part is asked for its batches one after the other."""

    part: int = -1
    """None is asked for with -1: it keeps the turns of the workers."""
    round: int = 0
    """Number of the batch in its part, from 0."""
    reading: int = 0
    """Number of the pass; what is left of an earlier one is forgotten."""
    start: PartStart | None = None
    """With the first request for a part in a pass."""
    is_dropped: bool = False
    """It was trained on before the run was resumed: to be read, and not handed over."""

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("epoch", "batch", "part", "round", "reading", "start", "is_dropped")
        return _request, tuple(getattr(self, name) for name in names)


def _request(epoch: int, batch: int, *more: Any) -> StreamRequest:
    return StreamRequest(epoch, batch, _NO_INDICES, *more)


_NO_INDICES = torch.empty(0, dtype=torch.int64)


def request_of(epoch: int, batch: int, **more: Any) -> StreamRequest:
    """A request, which has no indices."""
    return StreamRequest(epoch, batch, _NO_INDICES, **more)


@dataclass(slots=True)
class StreamedBatch(BuiltBatch):
    """A batch of a part, and where that stands."""

    tail: list[Any] | None = None
    """The part has ended, with so few samples that they make no batch."""
    state: Any = None
    """Of the data set after this batch."""

    def pin_memory(self) -> BuiltBatch:
        """The same in page-locked memory."""
        if self.batch is not None:
            self.batch = batches.pin(self.batch)
        return self


class StreamBuilder(BatchBuilder):
    """Builds batches of ``batch_size`` samples, or hands on the stream's own.

    What is drawn from the process's generators is a function of (seed, epoch, part, batch); not in threads beside the
    step, which draws from them too.

    Args:
        in_threads: several call it, who wait for one another's turns.
    """

    def __init__(
        self,
        stream: Stream,
        seed: int,
        batch_size: int,
        collate: Callable[[list[Any]], Batch] | None = None,
        *,
        purpose: str = "training",
        in_threads: bool = False,
    ) -> None:
        super().__init__(stream.dataset, seed, collate=collate, purpose=purpose, by_item=True)
        self.stream, self.batch_size = stream, batch_size
        self._turns = threading.Condition() if in_threads else None
        self._builds = not isinstance(stream.dataset, DataLoader)  # whose workers do, unseen
        self._readers: dict[int, _PartReader] = {}
        self._reading = -1

    def __call__(self, request: BatchRequest, heartbeat: Heartbeat = _UNREAD) -> BuiltBatch:
        """The next batch of a part; a failure of the data's is the reason of a lost sample."""
        assert isinstance(request, StreamRequest)
        if request.part < 0:
            return BuiltBatch(None)
        heartbeat.begin(request.epoch, request.batch)
        built: BuiltBatch
        try:
            with self._turn(request) as reader:
                stopwatch = Stopwatch()  # not of the wait for its turn
                built = BuiltBatch(None) if reader is None else reader.next(request)
                built.took = stopwatch.read() if self._builds else None
        except Exception as error:
            if is_of_the_machine(error):
                raise
            built = StreamedBatch(None, (LostSample(-1, reason_of(error), error),))
        heartbeat.end()
        return built

    def end_reading(self, reading: int | None = None) -> None:
        """Forget a pass, or whichever goes on; threads that still wait for a turn in it are not wanted any more."""
        if reading in (None, self._reading):
            self._reading, self._readers = -1, {}

    @contextmanager
    def _turn(self, request: StreamRequest) -> Iterator[_PartReader | None]:
        """The part's reader, when it is through with what comes before; None = it is no longer wanted."""
        with self._turns or nullcontext():
            if request.start is not None:
                if request.reading > self._reading:
                    self._reading, self._readers = request.reading, {}
                if request.reading == self._reading:
                    self._readers[request.part] = _PartReader(self, request, request.start)
            while not self._is_next(request):
                if request.reading != self._reading:
                    yield None
                    return
                assert self._turns is not None, f"part {request.part} is read by another worker"
                self._turns.wait(_LOOK_S)
            reader = self._readers[request.part]
        yield reader
        with self._turns or nullcontext():
            reader.round += 1
            if self._turns is not None:
                self._turns.notify_all()

    def _is_next(self, request: StreamRequest) -> bool:
        reader = self._readers.get(request.part)
        return request.reading == self._reading and reader is not None and reader.round == request.round

    def drawing(self, *place: int) -> AbstractContextManager[None]:
        """Within, the process's generators are those of a place, and are put back after."""
        seed = seed_from(self.seed, *place)
        if get_worker_info() is not None:
            generators.seed_for_sample(seed)  # a worker process has nobody else who draws
        elif threading.current_thread() is threading.main_thread():
            return _drawing(seed)
        return nullcontext()

    def collated(self, samples: list[Any], epoch: int, batch: int) -> Batch:
        """The batch of these samples."""
        try:
            return self._collate(samples)
        except Exception as error:
            place = f"{self.purpose} batch {batch} of epoch {epoch}"
            fault = collate_fault(self.dataset, self._collate, samples, range(len(samples)), place, error)
            if fault is None:
                raise
            raise fault from error


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    with generators.kept():
        generators.seed_for_sample(seed)
        yield


class _PartReader:
    """An iteration over one part of a stream."""

    def __init__(self, builder: StreamBuilder, request: StreamRequest, start: PartStart) -> None:
        self._builder, self._start, self.round = builder, start, request.round
        self._data, self._told = builder.stream.part(start.index, start.count, is_alone=start.is_alone)
        in_worker = self._told is not None or get_worker_info() is not None
        if builder.stream.worker_init is not None and in_worker:
            with as_worker(self._told or PartOf(0, 1, self._data)):
                builder.stream.worker_init(start.index)
        self._iterator: Iterator[Any] | None = None
        self._states: Any = None
        self._tail: list[Any] | None = None

    def next(self, request: StreamRequest) -> StreamedBatch:
        """The next batch; at the end of the part what is left, again and again."""
        if self._tail is not None:
            return StreamedBatch(None, tail=self._tail)
        builder = self._builder
        if self._iterator is None and self._start.state is None:
            # All parts begin with the same generators: data that shuffles its files and takes some must do it as the
            # others do.
            with builder.drawing(self._start.epoch), self._reading():
                iterator = self._begin()
                first = next(iterator, _END)
                self._iterator = iter(()) if first is _END else chain((first,), iterator)
        with builder.drawing(request.epoch, self._start.index, request.round):
            with self._reading():
                if self._iterator is None:
                    self._iterator = self._begin()
                wanted = 1 if builder.stream.gives_batches else builder.batch_size
                samples = list(islice(self._samples(), wanted))
            if len(samples) < wanted:
                self._tail, self._iterator = samples, iter(())
                return StreamedBatch(None, tail=samples)
            if request.is_dropped:
                return StreamedBatch(None)
            whole = samples[0] if builder.stream.gives_batches else None
            batch = builder.collated(samples, request.epoch, request.batch) if whole is None else whole
        if batch is None:
            raise builder.nothing_given(request.epoch, request.batch)
        state = None if self._states is None else copy.deepcopy(self._states.state_dict())
        return StreamedBatch(batch, state=state)

    def _begin(self) -> Iterator[Any]:
        data, start = self._data, self._start
        if callable(set_epoch := getattr(data, "set_epoch", None)):
            set_epoch(start.epoch)
        if start.state is not None and has_states(data):
            data.load_state_dict(start.state)
        iterator: Iterator[Any] = iter(data)
        keeper: Any = data if has_states(data) else iterator
        if start.state is not None and not has_states(data):
            keeper.load_state_dict(start.state)
        # Samples in a buffer are in no state: a reading is done again where there is one.
        self._states = keeper if has_states(keeper) and not start.shuffle_buffer else None
        return iterator

    def _samples(self) -> Iterator[Any]:
        assert self._iterator is not None
        if self._start.shuffle_buffer and not isinstance(self._iterator, _Shuffled):
            start = self._start
            rng = random.Random(seed_from(self._builder.seed, start.epoch, start.index, start.shuffle_buffer))
            self._iterator = _Shuffled(self._iterator, start.shuffle_buffer, rng)
        return self._iterator

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with as_worker(self._told):
                yield
        except SystemExit as exit_:
            raise ExitInData(exit_.code).with_traceback(exit_.__traceback__) from None


class _Shuffled(Iterator[Any]):
    """Gives one of so many samples at random, and puts the next in its place."""

    def __init__(self, samples: Iterator[Any], size: int, rng: random.Random) -> None:
        self._samples, self._rng = samples, rng
        self._held = list(islice(samples, size))

    def __next__(self) -> Any:
        if not self._held:
            raise StopIteration
        place = self._rng.randrange(len(self._held))
        sample = self._held[place]
        following = next(self._samples, _END)
        if following is _END:
            self._held[place] = self._held[-1]
            self._held.pop()
        else:
            self._held[place] = following
        return sample
