"""Tells the training process which sample each worker is at, also when the worker no longer answers."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wellfed.loading.batch_request import BatchRequest

_EPOCH, _BATCH, _INDEX, _SINCE_S, _PID = range(5)
_IDLE = -1
_WHOLE_BATCH = -1
"""Stands for an index: the worker is in the data's ``fetch``, or collates."""


@dataclass(frozen=True)
class Activity:
    """What a worker was at when it was looked at."""

    epoch: int
    batch: int
    index: int | None
    """None = the whole batch at once."""
    for_s: float
    """Seconds since it began with this sample, or with the batch."""

    def is_stuck_at(self, request: BatchRequest, timeout_s: float) -> bool:
        """Whether the worker hangs at this request. One that began with its sample a moment ago is slow, not stuck."""
        return (self.epoch, self.batch) == (request.epoch, request.batch) and self.for_s >= timeout_s / 2


class Heartbeats:
    """A row for each worker, in shared memory where they are processes: written by one, read by all.

    Shared by fork, and by spawn as a torch tensor is. Writing costs well under a microsecond a sample; torn reads do
    no harm, because it is only read once a worker has stopped moving.
    """

    def __init__(self, num_workers: int, *, shared: bool = True) -> None:
        self._shared = torch.full((num_workers, 5), float(_IDLE), dtype=torch.float64)
        if shared:
            self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._rows = self._shared.numpy()

    def __getstate__(self) -> torch.Tensor:
        return self._shared

    def __setstate__(self, shared: torch.Tensor) -> None:
        self._shared, self._rows = shared, shared.numpy()

    def of(self, worker: int) -> Heartbeat:
        """The row of one worker."""
        return Heartbeat(self._rows[worker])

    def pid(self, worker: int) -> int | None:
        """Process id that a worker has written down; None = it has not begun."""
        pid = int(self._rows[worker, _PID])
        return None if pid == _IDLE else pid

    def activity(self, worker: int) -> Activity | None:
        """What a worker is at; None = it waits for work."""
        epoch, batch, index, since_s, _ = self._rows[worker].tolist()
        if epoch == _IDLE or math.isnan(epoch):
            return None
        number = None if index == _WHOLE_BATCH else int(index)
        return Activity(int(epoch), int(batch), number, time.monotonic() - since_s)

    def clear(self) -> None:
        """Nobody is at anything."""
        self._rows[:] = _IDLE


class Heartbeat:
    """One worker's row, which it writes; without a row nobody reads it."""

    __slots__ = ("_row",)

    def __init__(self, row: Any = None) -> None:
        self._row = np.empty(5) if row is None else row

    def sign(self) -> None:
        """Write down which process this is."""
        self._row[_PID] = os.getpid()

    def begin(self, epoch: int, batch: int) -> None:
        """A batch is begun, as a whole."""
        row = self._row
        row[_SINCE_S] = time.monotonic()
        row[_INDEX] = _WHOLE_BATCH
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
