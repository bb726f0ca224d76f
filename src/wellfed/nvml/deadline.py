"""Limits how long a driver that hangs can hold its caller up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from wellfed.nvml.session import NvmlAbsentError

Answer = TypeVar("Answer")
START_S = 15.0
"""For the first look at a machine. Without persistence mode a driver wakes its cards one after the other, which takes
seconds: https://docs.nvidia.com/deploy/driver-persistence/"""


class NvmlStuckError(NvmlAbsentError):
    """A call did not come back in time."""

    reason = "did not answer in time"


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` returns or raises; it runs in a thread that is left behind when the time is over.

    Raises:
        NvmlStuckError: it took longer.
    """
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # noqa: BLE001  raised again where it was asked
            future.set_exception(error)

    threading.Thread(target=run, name="wellfed-nvml", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # its own
            raise
        raise NvmlStuckError("driver", f"did not answer within {seconds:g} s") from None
