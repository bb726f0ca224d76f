"""What the tests of this room share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def at_once() -> Iterator[Callable[..., None]]:
    """``at_once(num, *calls)`` calls each with 0 ... num-1, all in threads of their own that change turns often."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def run(num: int, *calls: Callable[[int], object]) -> None:
        together = threading.Barrier(len(calls))

        def repeat(call: Callable[[int], object]) -> None:
            together.wait()
            for number in range(num):
                call(number)

        with ThreadPoolExecutor(len(calls)) as pool:
            for task in [pool.submit(repeat, call) for call in calls]:
                task.result()

    yield run
    sys.setswitchinterval(interval_s)
