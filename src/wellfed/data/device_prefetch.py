"""Copies batches to the device before the step, on a CUDA stream of their own, so that copy and compute overlap.

The device holds at most ``ahead`` batches and the one in use. A slot is free again once the device, not only the host,
has finished the step of its batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

_STOP_S = 2.0
"""Maximum seconds to wait for a thread to stop."""
_LAUNCHED = 2
"""Maximum number of steps launched but unfinished: the running step, and the next."""


class DevicePrefetcher:
    """Yields the loader's batches in order, with up to ``ahead`` of them on the device before they are requested.

    The position follows the last batch handed out, not the batches already on the device. A thread reads the loader
    and, without workers, also builds the batches. A batch is released when the next is requested.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        ahead: int,
        *,
        move: Callable[[Batch, torch.device], Batch] = batches.to_device,
        before_move: Callable[[Delivery], None] = lambda delivery: None,
        no_room: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        """
        Args:
            loader: yields deliveries; has ``state_dict``, ``load_state_dict`` and ``close``.
            device: a GPU needs its index, since threads may differ in their current device.
            ahead: number of additional batches on the device, >= 1.
            move: copies a batch to the device; called on the side stream.
            before_move: called with each delivery while its batch is on the host.
            no_room: returns whether an error of ``move`` means that memory ran out. The batch is then handed out on the
                host, and its step copies it.
        """
        self._loader, self._device, self._ahead = loader, device, ahead
        self._move, self._before_move, self._no_room = move, before_move, no_room
        # Only a GPU copies during a step; on the CPU a copy is synchronous.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._position = _position(loader.state_dict())
        self._reader: _Reader | None = None
        self._launched: deque[torch.cuda.Event] = deque()
        """End events of the latest steps, oldest first."""
        self._is_in_use = False
        """Whether the batch handed out last has a step that is not launched yet."""

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next delivery, and other state of the loader."""
        return {**self._loader.state_dict(), **self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position."""
        self._stop()
        self._loader.load_state_dict(state)
        self._position = _position(self._loader.state_dict())

    def keep_pace(self) -> None:
        """Waits until the device has a free slot for the next batch.

        Called before the batch is requested, so that this wait is not counted as waiting for data.
        """
        self._step_is_launched()
        while len(self._launched) >= max(_LAUNCHED, self._ahead):
            self._launched.popleft().synchronize()

    def __iter__(self) -> Iterator[Delivery]:
        self._stop()
        self._loader.load_state_dict(self.state_dict())
        reader = self._reader = _Reader(self._loader, self._device, self._bring, self._ahead + 1)
        handed: list[Delivery] = []  # popped before the yield, or it would keep the batch on the device
        try:
            while reader.take(handed):
                self._hand_out(handed[0])
                yield handed.pop()
                self._step_is_launched()
        finally:
            reader.stop()

    def _bring(self, delivery: Delivery) -> Delivery:
        """Returns the delivery with its batch on the device, or on the host if memory ran out.

        The copy has finished on return, so host buffers may be reused.
        """
        self._before_move(delivery)
        began_s, took_ms = time.perf_counter(), None
        try:
            with torch.cuda.stream(self._stream):
                moved = self._move(delivery.batch, self._device)
        except Exception as error:
            if not self._no_room(error):
                raise
            return delivery
        if self._stream is not None:
            _end_of(self._stream).synchronize()  # releases the GIL; only this thread waits
            took_ms = 1e3 * (time.perf_counter() - began_s)
        return replace(delivery, batch=moved, is_on_device=True, copy_ahead_ms=took_ms)

    def _hand_out(self, delivery: Delivery) -> None:
        self._position = delivery.position or {"epoch": delivery.epoch, "batch": delivery.index + 1}
        self._is_in_use = True
        if delivery.is_on_device and self._stream is not None:
            # The memory belongs to the side stream. It must not be reused while kernels on the current stream may read
            # it.
            current = torch.cuda.current_stream(self._device)
            for tensor in batches.tensors(delivery.batch):
                if tensor.is_cuda:
                    tensor.record_stream(current)

    def _step_is_launched(self) -> None:
        """Records the end of the latest batch's step; the slot is free once the device reaches it."""
        if self._reader is None or not self._is_in_use:
            return
        self._is_in_use, end = False, None
        if self._stream is not None:
            end = _end_of(torch.cuda.current_stream(self._device))
            self._launched.append(end)
        self._reader.free.put(end)

    def close(self) -> None:
        """Ends the thread and the loader's workers; a later ``iter()`` restarts them.

        A thread that the dataset blocks is abandoned, and ends when it has its batch.
        """
        self._stop()
        self._loader.close()
        self._loader.load_state_dict(self.state_dict())

    def _stop(self) -> None:
        self._is_in_use = False
        self._launched.clear()
        if self._reader is not None:
            self._reader.stop()
            self._reader = None


def _position(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("epoch", "batch", "stream") if name in state}


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Returns an event that the device reaches after the work of a stream so far."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the default busy-waits
    event.record(stream)
    return event


class _Reader(threading.Thread):
    """Reads a loader, and copies each batch to the device when a slot is free."""

    def __init__(
        self, loader: Any, device: torch.device, bring: Callable[[Delivery], Delivery], num_slots: int
    ) -> None:
        # A daemon, since a dataset that hangs must not keep Python from exiting.
        super().__init__(name="wellfed-device-prefetch", daemon=True)
        self._loader, self._device, self._bring = loader, device, bring
        self.free: SimpleQueue[torch.cuda.Event | None] = SimpleQueue()
        """Free slots, each with the end event of its previous step."""
        for _ in range(num_slots):
            self.free.put(None)
        self._ready: SimpleQueue[Delivery | BaseException | None] = SimpleQueue()
        """Batches on the device; the last entry is an error, or None."""
        self._has_to_stop = False
        self.start()

    def take(self, into: list[Delivery]) -> bool:
        """Waits for the next delivery and appends it to ``into``; False after the last. Raises the error of reading."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            into.append(found)
        return found is not None

    def stop(self) -> None:
        """Stops reading, and waits up to `_STOP_S` for the current batch."""
        self._has_to_stop = True
        self.free.put(None)  # wakes the thread
        self.join(_STOP_S)

    def run(self) -> None:
        deliveries: Any = None
        end: BaseException | None = None
        try:
            if self._device.type == "cuda":  # pinning memory would create a context on the current device
                torch.cuda.set_device(self._device)
            deliveries = iter(self._loader)
            for delivery in deliveries:
                after = self.free.get()
                if after is not None and not self._has_to_stop:
                    after.synchronize()
                if self._has_to_stop:
                    break
                self._ready.put(self._bring(delivery))
        except BaseException as error:  # noqa: BLE001  raised again where the batch is requested
            end = error
        finally:
            self._ready.put(end)
            if deliveries is not None:
                deliveries.close()  # workers must end in the thread that started them
