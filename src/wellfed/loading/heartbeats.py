"""What each producer is at, where the training process can read it when the producer no longer answers."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_EPOCH, _BATCH, _INDEX, _SINCE_S, _PID = range(5)
_IDLE = -1
WHOLE_BATCH = -1
"""Stands for an index: the producer is in the data's ``fetch``, or collates."""


@dataclass(frozen=True)
class Doing:
    """What a producer was at when it was looked at."""

    epoch: int
    batch: int
    index: int | None
    """None = the whole batch at once."""
    for_s: float
    """Seconds since it began with this sample, or with the batch."""


class Notes:
    """A row for each producer, in shared memory where they are processes: written by one, read by all.

    Shared by fork, and by spawn as a torch tensor is. Writing costs well under a microsecond a sample; torn reads do
    no harm, because it is only read once a producer has stopped moving.
    """

    def __init__(self, num_producers: int, *, shared: bool = True) -> None:
        self._shared = torch.full((num_producers, 5), float(_IDLE), dtype=torch.float64)
        if shared:
            self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._rows = self._shared.numpy()

    def __getstate__(self) -> torch.Tensor:
        return self._shared

    def __setstate__(self, shared: torch.Tensor) -> None:
        self._shared, self._rows = shared, shared.numpy()

    def row(self, producer: int) -> Note:
        """The page of one producer."""
        return Note(self._rows[producer])

    def pid(self, producer: int) -> int | None:
        """Process id that a producer has written down; None = it has not begun."""
        pid = int(self._rows[producer, _PID])
        return None if pid == _IDLE else pid

    def doing(self, producer: int) -> Doing | None:
        """What a producer is at; None = it waits for work."""
        epoch, batch, index, since_s, _ = self._rows[producer].tolist()
        if epoch == _IDLE or math.isnan(epoch):
            return None
        number = None if index == WHOLE_BATCH else int(index)
        return Doing(int(epoch), int(batch), number, time.monotonic() - since_s)

    def clear(self) -> None:
        """Nobody is at anything."""
        self._rows[:] = _IDLE


class Note:
    """One producer's page."""

    __slots__ = ("_row",)

    def __init__(self, row: Any) -> None:
        self._row = row

    def sign(self) -> None:
        """Write down who this is."""
        self._row[_PID] = os.getpid()

    def begin(self, epoch: int, batch: int) -> None:
        """A batch is begun, as a whole."""
        row = self._row
        row[_SINCE_S] = time.monotonic()
        row[_INDEX] = WHOLE_BATCH
        row[_BATCH] = batch
        row[_EPOCH] = epoch

    def at(self, index: int) -> None:
        """A sample of the batch is begun."""
        row = self._row
        row[_SINCE_S] = time.monotonic()
        row[_INDEX] = index

    def end(self) -> None:
        """The batch is built."""
        self._row[_EPOCH] = _IDLE


def no_note() -> Note:
    """A page that nobody reads."""
    return Note(np.empty(5))
