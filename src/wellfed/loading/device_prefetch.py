"""Copies batches to the device ahead of the step, on a stream of their own, so that copy and compute overlap."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from wellfed.contract import Batch
from wellfed.loading import batches
from wellfed.loading.build import Delivery

Move = Callable[[Batch, torch.device], Batch]
_LOOK_S = 0.1
"""How often a thread that waits for a free place looks whether it is still wanted."""
_STOP_S = 2.0
"""Longest wait for a thread that has been told to stop."""


class Positioned(Protocol):
    """What is read ahead: deliveries, and the position of the next."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Delivery]: ...

    def state_dict(self) -> dict[str, Any]:
        """``epoch`` and ``batch`` of the next delivery, and what else it wants to know then."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position."""
        ...

    def close(self) -> None:
        """Nothing more is wanted."""
        ...


class DevicePrefetcher:
    """The loader's deliveries in its order, their batches on the device already, up to ``ahead`` of them before they
    are asked for.

    The position is that after the last delivery handed out, whatever is on the device already. The loader is read, and
    so without producers the batches are built, in a thread of this one's.
    """

    def __init__(
        self,
        loader: Positioned,
        device: torch.device,
        ahead: int,
        *,
        move: Move = batches.to_device,
        before_move: Callable[[Delivery], None] | None = None,
        on_less: Callable[[int, str], None] | None = None,
    ) -> None:
        """
        Args:
            ahead: >= 1; costs the device memory of so many batches.
            move: puts a batch on the device; called on the side stream.
            before_move: told of each delivery while its batch is on the host.
            on_less: told how many are copied ahead from now on, and why: the device has no room for so many. The batch
                that did not fit is handed out as it is, on the host. None = that is an error.
        """
        self._before_move, self._on_less = before_move, on_less
        self._loader, self._device, self._ahead, self._move = loader, device, ahead, move
        self._position = _position(loader.state_dict())
        self._running: _ReadAhead | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.latest: Batch = None
        """The batch that was handed out last."""

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next delivery, and what else the loader wants to know then."""
        return {**self._loader.state_dict(), **self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position."""
        self._stop()
        self._loader.load_state_dict(state)
        self._position = _position(state)

    def __iter__(self) -> Iterator[Delivery]:
        self._stop()
        self._loader.load_state_dict(self.state_dict())
        running = self._running = _ReadAhead(self._loader, self._bring, self._ahead)
        try:
            for delivery in running:
                self._position = {"epoch": delivery.epoch, "batch": delivery.index + 1}
                self.latest = delivery.batch
                yield delivery
        finally:
            running.stop()

    def close(self) -> None:
        """Stop what reads ahead, the loader's producers too; a later ``iter()`` starts them anew.

        A thread that the data set holds up is left behind with the loader.
        """
        self.latest = None
        if self._stop():
            self._loader.close()
            self._loader.load_state_dict(self.state_dict())

    def _stop(self) -> bool:
        """Whether nothing reads the loader any more."""
        running, self._running = self._running, None
        return running is None or running.stop()

    def _bring(self, delivery: Delivery) -> Delivery:
        """The delivery with its batch on the device; done when it returns, so the host's buffers may be used again.

        Or as it is, where the device has no room for it.
        """
        if self._before_move is not None:
            self._before_move(delivery)
        try:
            return self._moved(delivery)
        except torch.OutOfMemoryError as error:
            if self._on_less is None:
                raise
            message = str(error).partition("\n")[0]
        self._ahead = max(1, self._ahead - 1)
        self._on_less(self._ahead, message)
        return delivery

    def _moved(self, delivery: Delivery) -> Delivery:
        if self._stream is None:
            return replace(delivery, batch=self._move(delivery.batch, self._device))
        with torch.cuda.stream(self._stream):
            moved = self._move(delivery.batch, self._device)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        copied.synchronize()  # without Python's lock: only this thread waits

        def arrive() -> None:
            # The step's stream must not begin before the copy, and the memory, which belongs to the side stream, must
            # not be given to the next batch while the step still reads it.
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in batches.tensors(moved):
                if tensor.is_cuda:
                    tensor.record_stream(current)

        return replace(delivery, batch=moved, arrive=arrive)


def _position(state: dict[str, Any]) -> dict[str, int]:
    return {"epoch": int(state["epoch"]), "batch": int(state["batch"])}


class _ReadAhead:
    """A thread that reads a loader for as long as there is room for what it reads."""

    def __init__(self, loader: Positioned, bring: Callable[[Delivery], Delivery], ahead: int) -> None:
        self._loader, self._bring = loader, bring
        self._room, self._ahead = threading.Semaphore(ahead), ahead
        self._too_many = threading.Semaphore(0)
        """Places that are not given again when a batch leaves them."""
        self._ready: queue.SimpleQueue[Delivery | _End] = queue.SimpleQueue()
        self._is_stopped = False
        # A daemon: a data set that hangs must not keep Python from ending.
        self._thread = threading.Thread(target=self._run, name="wellfed-device-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Delivery]:
        while isinstance(found := self._ready.get(), Delivery):
            if not self._too_many.acquire(blocking=False):
                self._room.release()
            yield found
        if found.error is not None:
            raise found.error

    def stop(self) -> bool:
        """Read no more; waits a moment for the batch in hand. Whether the thread has ended."""
        self._is_stopped = True
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        deliveries: Any = iter(self._loader)
        try:
            while self._has_room():
                delivery = next(deliveries, None)
                if delivery is None:
                    break
                brought = self._bring(delivery)
                if brought is delivery and self._ahead > 1:
                    self._ahead -= 1
                    self._too_many.release()
                self._ready.put(brought)
        except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
            self._ready.put(_End(error))
        else:
            self._ready.put(_End(None))
        finally:
            deliveries.close()  # its producers end in the thread that has started them

    def _has_room(self) -> bool:
        while not self._is_stopped:
            if self._room.acquire(timeout=_LOOK_S):
                return not self._is_stopped
        return False


class _End:
    """Nothing follows; or an error does."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
