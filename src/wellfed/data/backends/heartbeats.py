"""Tells the training process which sample each worker is at, also when the worker no longer answers."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

import torch

from wellfed.data.backends.batch_request import BatchRequest

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


class Heartbeat:
    """What one worker is at: written by it, read by the training process, in shared memory where it is another's.

    Shared by fork, and by spawn as a torch tensor is. Writing costs well under a microsecond a sample; torn reads do
    no harm, because it is only read once a worker has stopped moving.
    """

    def __init__(self, row: torch.Tensor | None = None) -> None:
        """``row``: one of `shared_heartbeats`; None = this process's own."""
        self.__setstate__(torch.full((5,), float(_IDLE), dtype=torch.float64) if row is None else row)

    def __getstate__(self) -> torch.Tensor:
        return self._shared

    def __setstate__(self, shared: torch.Tensor) -> None:
        self._shared, self._row = shared, shared.numpy()

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

    @property
    def pid(self) -> int | None:
        """Process id that the worker has written down; None = it has not begun."""
        pid = int(self._row[_PID])
        return None if pid == _IDLE else pid

    def activity(self) -> Activity | None:
        """What the worker is at; None = it waits for work."""
        epoch, batch, index, since_s, _ = self._row.tolist()
        if epoch == _IDLE or math.isnan(epoch):
            return None
        number = None if index == _WHOLE_BATCH else int(index)
        return Activity(int(epoch), int(batch), number, time.monotonic() - since_s)

    def stuck_at(self, request: BatchRequest, timeout_s: float) -> Activity | None:
        """What the worker is at, if it hangs at this request. One that began with its sample a moment ago is slow."""
        at = self.activity()
        if at is None or (at.epoch, at.batch) != (request.epoch, request.batch) or at.for_s < timeout_s / 2:
            return None
        return at

    def clear(self) -> None:
        """Nobody is at anything."""
        self._row[:] = _IDLE


def shared_heartbeats(num_workers: int) -> list[Heartbeat]:
    """One for each worker process."""
    rows = torch.full((num_workers, 5), float(_IDLE), dtype=torch.float64)
    rows.share_memory_()  # type: ignore[no-untyped-call]
    return [Heartbeat(row) for row in rows]
