"""Yields the batches of a stream: from any position in training, from the start in evaluation.

A stream is read in parts, whose batches take turns, with any number of workers. The last batch of each part may have
fewer samples.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.backends.batch_source import BatchSource
from wellfed.data.settings import LoaderSettings
from wellfed.data.streams.stream import Stream
from wellfed.data.streams.stream_builder import PartStart, StreamBuilder, StreamedBatch, StreamRequest, request_of
from wellfed.errors import DataError
from wellfed.record.entries import OnEvent, ignore_event

_LOG = logging.getLogger(__name__)
UNKNOWN_LENGTH = 2**53
"""Length reported for a stream. Without a length, Lightning reads one batch ahead and loses it at a checkpoint."""


class Mark(NamedTuple):
    """A position in an epoch of a stream, as in checkpoints."""

    parts: int
    """Parts that each rank reads in turn in this epoch."""
    ranks: int
    asked: int = 0
    """Turns of parts up to the last batch handed out; used with ``states``."""
    states: list[Any] | None = None
    """State of the dataset for each part; None = the dataset has no states."""
    ended: list[int] | None = None
    """Parts that have ended; used with ``states``."""


Steps = Generator[tuple[Delivery, Mark]]


class StreamReading:
    """Reads a stream by the backend of the settings, one pass at a time."""

    def __init__(
        self,
        stream: Stream,
        settings: LoaderSettings,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Batch] | None = None,
        purpose: str = "training",
        on_event: OnEvent = ignore_event,
    ) -> None:
        """
        Args:
            batch_size: samples of one rank's batch.
        """
        self.on_event = on_event
        self.stream, self._rank, self._world_size = stream, rank, world_size
        if settings.num_workers > 1 and stream.shared_by is None:
            settings = replace(settings, num_workers=1)
        self._settings = settings
        self._builder = StreamBuilder(stream, seed, batch_size, collate, purpose=purpose, drop_last=drop_last)
        self._source = BatchSource(self._builder, self._settings)
        self._numbers = count()

    def start_of_epoch(self) -> Mark:
        """Returns the position at the start of an epoch."""
        return Mark(self.stream.num_parts(self._settings.num_workers, self._world_size), self._world_size)

    def batches(self, epoch: int, mark: Mark, order_of: int, number: int = 0) -> Steps:
        """Yields the batches of an epoch after a position, each with the position after it.

        Args:
            order_of: epoch that determines the order.
            number: batches before the position.
        """
        ended = set[int]() if mark.states is None else set(mark.ended or ())
        states = list(mark.states or [None] * mark.parts)
        to_drop = 0 if mark.states is not None else number
        """Batches before the position, read again."""
        has_dropped = to_drop > 0
        reading = next(self._numbers)
        running = self._source.start(self._requests(reading, epoch, mark, order_of, ended, to_drop), UNKNOWN_LENGTH)
        try:
            for request, built in running:
                if self._source.is_left(running):
                    return
                assert isinstance(request, StreamRequest)
                if built.lost:
                    lost, name = built.lost[0], self.stream.name
                    raise DataError(
                        f"{name}: {self._builder.purpose} batch {number} of epoch {epoch} could not be read: "
                        f"{lost.reason}. Repair it, or let {name} leave out what it can't read."
                    ) from lost.cause
                if not isinstance(built, StreamedBatch):
                    continue
                if built.is_last:
                    ended.add(request.part)
                if to_drop:
                    to_drop -= built.is_dropped or built.batch is not None
                elif built.batch is not None:
                    states[request.part] = built.state
                    # Parts have no state for what was dropped: the whole epoch resumes by dropping.
                    has_states = not has_dropped and any(state is not None for state in states)
                    known = list(states) if has_states else None
                    turn = request.round * mark.parts + request.part
                    mark = mark._replace(asked=turn + 1, states=known, ended=sorted(ended))
                    size = self._size(built.batch)
                    total = size * mark.ranks
                    yield Delivery(built.batch, epoch, number, total, num_samples=size, took=built.took), mark
                    number += 1
                if len(ended) == mark.parts:
                    return
        finally:
            self._builder.end_reading(reading)
            running.close()

    def _requests(
        self, reading: int, epoch: int, mark: Mark, order_of: int, ended: set[int], to_drop: int
    ) -> Iterator[StreamRequest]:
        """Yields requests round after round until all parts have ended.

        Workers take the requests in turn, so one worker gets all requests for a part.
        """
        num_readers = max(1, self._settings.num_workers)
        a_round = math.ceil(mark.parts / num_readers) * num_readers
        begun = set[int]()
        first = mark.asked // mark.parts if mark.states is not None else 0
        for round_ in count(first):
            for part in range(a_round):
                if len(ended) == mark.parts:
                    return
                turn = round_ * mark.parts + part
                request = request_of(epoch, turn)
                is_before = mark.states is not None and turn < mark.asked
                if part < mark.parts and part not in ended and not is_before:
                    # A batch of an early turn is surely before the position. Parts that have ended take turns, too.
                    request = request_of(
                        epoch, turn, part=part, round=round_, reading=reading, is_dropped=turn < to_drop
                    )
                    if part not in begun:
                        begun.add(part)
                        request.start = PartStart(
                            # The first parts may have one shard more, so they are spread over the ranks.
                            part * self._world_size + self._rank,
                            self._world_size * mark.parts,
                            order_of,
                            is_alone=mark.parts <= num_readers,
                            state=None if mark.states is None else mark.states[part],
                        )
                yield request

    def _size(self, batch: Batch) -> int:
        """Returns the samples of a batch; for a layout of its own, its weight."""
        if not self._builder.splits_itself:
            return batches.batch_size(batch)
        own = getattr(self.stream, "weight", batches.batch_size)
        return int(own(batch)) if self.stream.gives_batches else self._builder.batch_size

    def stop(self) -> None:
        """Ends the pass."""
        self._builder.end_reading()
        self._source.stop()

    def close(self) -> None:
        """Ends the pass and the workers; a later pass starts new ones."""
        self._builder.end_reading()
        self._source.close()


class StreamLoader:
    """Yields the steps of successive epochs. The position follows the last batch handed out, not queued ones."""

    def __init__(
        self,
        reading: StreamReading,
        *,
        steps_per_epoch: int | None,
        limit_batches: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """
        Args:
            steps_per_epoch: steps by the stream's length; None = unknown.
            shuffle: False = all epochs have the stream's order.
        """
        self._reading, self._limit, self._shuffle = reading, limit_batches, shuffle
        self._expected = steps_per_epoch
        self._epoch = self._next_batch = self._total = 0
        self._mark, self._is_over = reading.start_of_epoch(), False
        self._keeps_states: bool | None = None
        """Whether a checkpoint can hold the states of the dataset; None = unknown."""
        self._running: Steps | None = None

    def __len__(self) -> int:
        return UNKNOWN_LENGTH

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch over all ranks; None = unknown."""
        limits = [limit for limit in (self._expected, self._limit) if limit is not None]
        return min(limits, default=None)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch + self._is_over

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch."""
        stream = {"total": self._total, "is_over": self._is_over, **self._mark._asdict()}
        return {"epoch": self._epoch, "batch": self._next_batch, "stream": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position: by the states of the dataset, else by reading and dropping earlier batches."""
        self._epoch, self._next_batch = int(state["epoch"]), int(state["batch"])
        found = dict(state.get("stream", {}))
        self._total = found.pop("total", self._next_batch)
        self._is_over = bool(found.pop("is_over", False)) and self._next_batch > 0
        self._mark = self._reading.start_of_epoch()
        if self._next_batch == 0 or not found:
            return
        if found["ranks"] != self._mark.ranks:
            _LOG.warning(
                "%s was read by %d ranks before, and is by %d now: what is left of epoch %d is not what was left then.",
                self._reading.stream.name, found["ranks"], self._mark.ranks, self._epoch,
            )  # fmt: skip
            self._reading.on_event("resume_inexact", epoch=self._epoch)
            found = {**found, "ranks": self._mark.ranks, "states": None}
        self._mark = Mark(**found)

    def __iter__(self) -> Iterator[Delivery]:
        self._reading.stop()
        if self._is_over or (self._limit is not None and self._next_batch >= self._limit):
            self._epoch, self._next_batch, self._is_over = self._epoch + 1, 0, False
            self._mark = self._reading.start_of_epoch()
        order_of = self._epoch if self._shuffle else 0
        running = self._running = self._reading.batches(self._epoch, self._mark, order_of, self._next_batch)
        held: tuple[Delivery, Mark] | None = None
        try:
            for delivery, mark in running:
                if self._running is not running:
                    return  # another pass began while a batch blocked this thread
                if held is not None:
                    yield self._given(*held)
                held = delivery, mark
                if delivery.index + 1 == self._limit:
                    break
        except Exception:  # the previous batch is sound
            if held is not None and self._running is running:
                yield self._given(*held)
            raise
        finally:
            running.close()
        if self._running is not running:
            return
        if held is None:
            self._nothing_came()
            if self._mark.ranks == 1:  # several ranks begin the next epoch together
                yield from self
            return
        held[0].is_last = True
        yield self._given(*held)

    def _given(self, delivery: Delivery, mark: Mark) -> Delivery:
        if mark.ranks > 1:  # a checkpoint is written by one rank
            mark = mark._replace(states=None)
        if mark.states is not None and self._keeps_states is None:
            self._keeps_states = _can_be_saved(mark.states)
            if not self._keeps_states:
                _LOG.warning(
                    "%s.state_dict() holds more than numbers, texts, tensors and lists or dicts of them, which a "
                    "checkpoint can't. A resumed run will read the epoch again up to where it was left.",
                    self._reading.stream.name,
                )
        self._mark = mark if self._keeps_states else mark._replace(states=None)
        self._next_batch, self._is_over = delivery.index + 1, delivery.is_last
        self._total += 1
        delivery.position = self.state_dict()
        return delivery

    def _nothing_came(self) -> None:
        """Marks the epoch as ended, or raises a DataError if it had no batch."""
        name, epoch = self._reading.stream.name, self._epoch
        if self._next_batch == 0:
            if epoch:
                why = "An epoch is one reading: let each iter() begin anew."
            else:
                why = "Check workload.data, and with workload.drop_last=true that there are enough samples for a step."
            raise DataError(f"{name} gave no batch in epoch {epoch}. {why}")
        self._is_over = True

    def close(self) -> None:
        """Ends workers and everything built ahead; a later ``iter()`` restarts them."""
        self._running = None
        self._reading.close()


class EvalStream:
    """A split that is a stream, read from its start at each ``iter()``. Every rank reads all of it."""

    def __init__(self, reading: StreamReading, *, limit_batches: int | None = None) -> None:
        self._reading, self._limit = reading, limit_batches

    def __len__(self) -> int:
        return UNKNOWN_LENGTH if self._limit is None else self._limit

    def __iter__(self) -> Iterator[Delivery]:
        reading = self._reading
        reading.stop()
        running, delivery = reading.batches(0, reading.start_of_epoch(), 0), None
        try:
            for delivery, _ in running:
                yield delivery
                if delivery.index + 1 == self._limit:
                    return
            if delivery is None:
                way_out = "Check workload.data, or leave the split out of Datasets."
                raise DataError(f"{reading.stream.name} gave no sample to evaluate. {way_out}")
        finally:
            running.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the start position, where each pass begins."""
        return {"epoch": 0, "batch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: a pass is never resumed in the middle."""

    def close(self) -> None:
        """Ends persistent worker processes."""
        self._reading.close()


def _can_be_saved(states: Sequence[Any]) -> bool:
    """Returns whether a weights-only load can read the states."""
    file = io.BytesIO()
    try:
        torch.save(list(states), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001  whatever a user's state does when it is pickled
        return False
    return True
