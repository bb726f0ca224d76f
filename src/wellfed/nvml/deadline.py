"""A limit on how long a driver that hangs can hold its caller up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from wellfed.nvml.session import NvmlAbsentError

Answer = TypeVar("Answer")
START_S = 15.0
"""For the first look at a machine. Without persistence mode a driver wakes its cards one after the other, which takes
seconds: https://docs.nvidia.com/deploy/driver-persistence/"""


class NvmlStuckError(NvmlAbsentError):
    """A call did not come back in time."""

    reason = "did not answer in time"


class _Asking(Generic[Answer]):
    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._ask = ask
        self.answers: list[Answer] = []
        self.error: Exception | None = None

    def __call__(self) -> None:
        try:
            self.answers.append(self._ask())
        except Exception as error:  # noqa: BLE001  raised again where it was asked
            self.error = error


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` returns or raises; it runs in a thread that is left behind when the time is over.

    Raises:
        NvmlStuckError: it took longer.
    """
    asking = _Asking(ask)
    thread = threading.Thread(target=asking, name="wellfed-nvml", daemon=True)
    thread.start()
    thread.join(seconds)
    if asking.error is not None:
        raise asking.error
    if not asking.answers:
        raise NvmlStuckError("driver", f"did not answer within {seconds:g} s")
    return asking.answers[0]
