"""Reads the parts of a stream and builds their batches, in any process or thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from wellfed import generators
from wellfed.contract import Batch
from wellfed.data.backends.batch_builder import (
    BatchBuilder,
    build_time,
    clocks,
    collate_fault,
    is_of_the_machine,
)
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LostSample
from wellfed.data.streams.stream import PartOf, Stream, as_worker, has_states
from wellfed.errors import reason_of
from wellfed.sample_rng import seed_from

_END = object()
_NO_INDICES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class PartStart:
    """The position at which reading a part starts."""

    index: int
    count: int
    """Number of parts over all ranks."""
    epoch: int
    """Epoch that determines the order."""
    is_alone: bool
    """Whether the process reads no other part."""
    state: Any = None
    """State of the dataset to continue from; None = the start."""


@dataclass(slots=True)
class StreamRequest(BatchRequest):
    """A request for the next batch of a part. One reader gets all requests for a part, in order."""

    part: int = -1
    """Number of the part; -1 = an empty request, which keeps parts and workers aligned."""
    round: int = 0
    """Number of the batch in its part, from 0."""
    reading: int = 0
    """Number of the pass; requests of an earlier pass are dropped."""
    start: PartStart | None = None
    """Set in the first request for a part in a pass."""
    is_dropped: bool = False
    """Whether the batch is read and dropped, since the run trained on it before it was resumed."""

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("epoch", "batch", "part", "round", "reading", "start", "is_dropped")
        return request_of, tuple(getattr(self, name) for name in names)


def request_of(epoch: int, batch: int, *more: Any, **named: Any) -> StreamRequest:
    """Returns a request without indices."""
    return StreamRequest(epoch, batch, _NO_INDICES, None, *more, **named)


@dataclass(slots=True)
class StreamedBatch(BuiltBatch):
    """A batch of a part, and the position after it."""

    is_last: bool = False
    """Whether the part has ended, with this batch or before it."""
    is_dropped: bool = False
    """Whether a batch was read and dropped, as requested."""
    state: Any = None
    """State of the dataset after this batch."""


class StreamBuilder(BatchBuilder):
    """Builds batches of ``batch_size`` samples, or passes on the stream's own batches.

    Draws from the process's generators are functions of (seed, epoch, part, batch).
    """

    def __init__(
        self,
        stream: Stream,
        seed: int,
        batch_size: int,
        collate: Callable[[list[Any]], Batch] | None = None,
        *,
        purpose: str = "training",
        drop_last: bool = False,
    ) -> None:
        super().__init__(stream.dataset, seed, collate=collate, purpose=purpose, by_item=True)
        self.stream, self.batch_size, self.drop_last = stream, batch_size, drop_last
        self._builds = not isinstance(stream.dataset, DataLoader)  # its own workers build the batches
        self._readers: dict[int, _PartReader] = {}
        self._reading = -1

    def __call__(self, request: BatchRequest) -> BuiltBatch:
        """Returns the next batch of a part; an error of the dataset is returned as a lost sample."""
        assert isinstance(request, StreamRequest)
        if request.part < 0:
            return BuiltBatch(None)
        built: BuiltBatch
        began = clocks()
        try:
            if request.start is not None:
                if request.reading != self._reading:
                    self._reading, self._readers = request.reading, {}
                self._readers[request.part] = _PartReader(self, request.start)
            built = self._readers[request.part].next(request)
            built.took = build_time(began) if self._builds else None
        except Exception as error:
            if is_of_the_machine(error):
                raise
            built = StreamedBatch(None, (LostSample(-1, reason_of(error), error),))
        return built

    def end_reading(self, reading: int | None = None) -> None:
        """Drops the iterators of a pass that has ended, of any pass if None."""
        if reading in (None, self._reading):
            self._readers = {}

    @contextmanager
    def drawing(self, *place: int) -> Iterator[None]:
        """Seeds the process's generators by (seed, *place) inside, and restores them after."""
        in_worker = get_worker_info() is not None  # where nothing else draws
        is_main = not in_worker and threading.current_thread() is threading.main_thread()
        with generators.kept() if is_main else nullcontext():
            if in_worker or is_main:
                generators.seed_for_sample(seed_from(self.seed, *place))
            yield

    def collated(self, samples: list[Any], epoch: int, batch: int) -> Batch:
        """Collates samples. An error names the sample at fault."""
        try:
            return self._collate(samples)
        except Exception as error:
            place = f"{self.purpose} batch {batch} of epoch {epoch}"
            fault = collate_fault(self.dataset, self._collate, samples, range(len(samples)), place, error)
            if fault is None:
                raise
            raise fault from error


class _PartReader:
    """An iterator over the batches of one part of a stream."""

    def __init__(self, builder: StreamBuilder, start: PartStart) -> None:
        self._builder, self._start = builder, start
        self._data, self._told = builder.stream.part(start.index, start.count, is_alone=start.is_alone)
        in_worker = self._told is not None or get_worker_info() is not None
        if builder.stream.worker_init is not None and in_worker:
            with as_worker(self._told or PartOf(0, 1, self._data)):
                builder.stream.worker_init(start.index)
        self._iterator: Iterator[Any] | None = None
        self._states: Any = None
        self._has_ended = False

    def next(self, request: StreamRequest) -> StreamedBatch:
        """Returns the next batch, without a batch after the end of the part."""
        if self._has_ended:
            return StreamedBatch(None, is_last=True)
        builder = self._builder
        if self._iterator is None and self._start.state is None:
            # All parts begin with the same seed, so that a dataset that shuffles and distributes its files does so
            # alike in all.
            with builder.drawing(self._start.epoch), as_worker(self._told):
                iterator = self._begin()
                first = next(iterator, _END)
                self._iterator = iter(()) if first is _END else chain((first,), iterator)
        with builder.drawing(request.epoch, self._start.index, request.round):
            with as_worker(self._told):
                if self._iterator is None:
                    self._iterator = self._begin()
                wanted = 1 if builder.stream.gives_batches else builder.batch_size
                samples = list(islice(self._iterator, wanted))
            self._has_ended = len(samples) < wanted
            if not samples or (self._has_ended and builder.drop_last):
                return StreamedBatch(None, is_last=True)
            if request.is_dropped:
                return StreamedBatch(None, is_dropped=True, is_last=self._has_ended)
            whole = samples[0] if builder.stream.gives_batches else None
            batch = builder.collated(samples, request.epoch, request.batch) if whole is None else whole
        if batch is None:
            raise builder.nothing_given(request.epoch, request.batch)
        state = None if self._states is None or self._has_ended else copy.deepcopy(self._states.state_dict())
        return StreamedBatch(batch, is_last=self._has_ended, state=state)

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
        self._states = keeper if has_states(keeper) else None
        return iterator
