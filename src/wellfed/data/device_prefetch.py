"""Copies batches to the device ahead of the step, on a stream of their own, so that copy and compute overlap.

The device has places for ``ahead`` batches and for the one in use. A batch may be copied once there is a free place; a
place is free again when the device, not only the host, is through with the step of its batch.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

Move = Callable[[Batch, torch.device], Batch]
_LOOK_S = 0.1
"""How often a thread that waits for a free place looks whether it is still wanted."""
_STOP_S = 2.0
"""Longest wait for a thread that has been told to stop."""
_LAUNCHED = 2
"""Steps that the host may have launched before the device has done them: it is at one, and the next is there."""


class Positioned(Protocol):
    """What is read ahead: deliveries, and the position of the next."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Delivery]: ...

    def state_dict(self) -> dict[str, Any]:
        """``epoch`` and ``batch`` of the next delivery, and what else it wants to know then."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position."""

    def close(self) -> None:
        """Nothing more is wanted."""


class DevicePrefetcher:
    """The loader's deliveries in its order, their batches on the device already, up to ``ahead`` of them before they
    are asked for.

    The position is that after the last delivery handed out, whatever is on the device already. The loader is read, and
    so without workers the batches are built, in a thread of this one's. A batch is no longer needed when the next is
    asked for: who keeps one keeps its memory, beside those that are counted here.
    """

    def __init__(
        self,
        loader: Positioned,
        device: torch.device,
        ahead: int,
        *,
        move: Move = batches.to_device,
        before_move: Callable[[Delivery], None] | None = None,
        no_room: Callable[[Exception], str | None] = lambda error: None,
        on_less: Callable[[int, str], None] | None = None,
    ) -> None:
        """
        Args:
            device: with its index, where it is a GPU: not all threads agree on which is the current one.
            ahead: >= 1; costs the device memory of so many batches.
            move: puts a batch on the device; called on the side stream.
            before_move: told of each delivery while its batch is on the host.
            no_room: what an error of ``move`` says, where it is that memory did not suffice; else None.
            on_less: told how many are copied ahead from now on, and why: there is no room for so many. A batch that
                does not even fit alone is handed out as it is, on the host. None = that is an error.
        """
        self._loader, self._device, self._ahead = loader, device, ahead
        self._move, self._before_move, self._no_room, self._on_less = move, before_move, no_room, on_less
        # For copies, beside that of the steps; on the CPU a copy is done when it is made.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._position = _position(loader.state_dict())
        self._running: _ReadAhead | None = None
        self._launched: deque[torch.cuda.Event] = deque()
        """The ends of the latest steps, oldest first."""
        self._is_in_use = False
        self.latest: Batch = None
        """The batch that was handed out last; None once the next is asked for."""

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next delivery, and what else the loader wants to know then."""
        return {**self._loader.state_dict(), **self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position."""
        self._stop()
        self._loader.load_state_dict(state)
        self._position = _position(self._loader.state_dict())

    def keep_pace(self) -> None:
        """Wait until the device is so near that the next batch has a place there: to be called before it is asked for,
        so that waiting for the device is not taken for waiting for data."""
        self._step_is_launched()
        while len(self._launched) >= max(_LAUNCHED, self._ahead):
            self._launched.popleft().synchronize()

    def __iter__(self) -> Iterator[Delivery]:
        self._stop()
        self._loader.load_state_dict(self.state_dict())
        running = self._running = _ReadAhead(self._loader, self._device, self._bring, self._ahead + 1)
        handed: list[Delivery] = []  # from which it is taken: what stands still here would keep it on the device
        try:
            while running.take(handed):
                self._hand_out(handed[0])
                yield handed.pop()
                self._step_is_launched()
        finally:
            running.stop()
            self._ahead = running.num_places - 1

    def _bring(self, delivery: Delivery, num_places: int) -> Delivery | None:
        """The delivery with its batch on the device; None where the device has no room for it beside others, and so
        is to have a place less. A batch that does not even fit alone stays on the host.

        The copy is done when this returns: the host's buffers may be used again, and whatever is launched from now on
        comes after it.
        """
        if self._before_move is not None:
            self._before_move(delivery)
        try:
            with torch.cuda.stream(self._stream):
                moved = self._move(delivery.batch, self._device)
            if self._stream is not None:
                copied = _event()
                copied.record(self._stream)
                copied.synchronize()  # without Python's lock: only this thread waits
            return replace(delivery, batch=moved, is_on_device=True)
        except Exception as error:
            message = self._no_room(error)
            if message is None or self._on_less is None:
                raise
        if num_places == 1:
            return delivery
        self._on_less(num_places - 2, message)
        return None

    def _hand_out(self, delivery: Delivery) -> None:
        self._position = delivery.position or {"epoch": delivery.epoch, "batch": delivery.index + 1}
        self._is_in_use = True
        if not delivery.is_on_device:
            return
        self.latest = delivery.batch
        if self._stream is not None:
            # Keep the batch's memory, which belongs to the side stream, from the next batch as long as what is launched
            # on the current stream may read it.
            current = torch.cuda.current_stream(self._device)
            for tensor in batches.tensors(delivery.batch):
                if tensor.is_cuda:
                    tensor.record_stream(current)

    def _step_is_launched(self) -> None:
        """All that is done with the batch that was handed out last."""
        if self._running is None or not self._is_in_use:
            return
        self.latest, self._is_in_use, end = None, False, None
        if self._stream is not None:
            end = _event()
            end.record(torch.cuda.current_stream(self._device))
            self._launched.append(end)
        self._running.free.put(end)

    def close(self) -> None:
        """Stop what reads ahead, the loader's workers too; a later ``iter()`` starts them anew.

        A thread that the data holds up is left behind, and ends with the batch that it waits for.
        """
        self._stop()
        self._loader.close()
        self._loader.load_state_dict(self.state_dict())

    def _stop(self) -> None:
        self.latest, self._is_in_use = None, False
        self._launched.clear()
        running, self._running = self._running, None
        if running is not None:
            running.stop()


def _position(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("epoch", "batch", "stream") if name in state}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the default keeps a core busy


class _ReadAhead:
    """A thread that reads a loader, and brings what it has read to the device when there is a place for it."""

    def __init__(
        self,
        loader: Positioned,
        device: torch.device,
        bring: Callable[[Delivery, int], Delivery | None],
        num_places: int,
    ) -> None:
        """``bring`` puts a batch on the device; given the number of places, None = there must be one less for it."""
        self._loader, self._device, self._bring, self.num_places = loader, device, bring, num_places
        self.free: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        """Each free place, with the end of the step after which it is free."""
        for _ in range(num_places):
            self.free.put(None)
        self._ready: queue.SimpleQueue[Delivery | BaseException | None] = queue.SimpleQueue()
        """In the end an error, or None."""
        self._is_stopped = False
        # A daemon: a data set that hangs must not keep Python from ending.
        self._thread = threading.Thread(target=self._run, name="wellfed-device-prefetch", daemon=True)
        self._thread.start()

    def take(self, into: list[Delivery]) -> bool:
        """The next delivery, waited for; False behind the last. Raises what reading it raised."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            into.append(found)
        return found is not None

    def stop(self) -> None:
        """Read no more; waits a moment for the batch in hand."""
        self._is_stopped = True
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        deliveries: Any = iter(self._loader)
        end: BaseException | None = None
        try:
            if (
                self._device.type == "cuda"
            ):  # with another one current it would get a context, and memory be pinned for it
                torch.cuda.set_device(self._device)
            for delivery in deliveries:
                if not self._has_place():
                    break
                self._bring_to_place(delivery)
        except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
            end = error
        finally:
            self._ready.put(end)
            deliveries.close()  # its workers end in the thread that has started them

    def _bring_to_place(self, delivery: Delivery) -> None:
        while (brought := self._bring(delivery, self.num_places)) is None:
            self.num_places -= 1
            if not self._has_place():  # that of a batch whose memory this one gets
                return
        self._ready.put(brought)

    def _has_place(self) -> bool:
        """Waits for a place; False = it is no longer wanted."""
        while not self._is_stopped:
            try:
                after = self.free.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if after is not None:
                after.synchronize()
            return not self._is_stopped
        return False
