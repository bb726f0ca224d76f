import threading
import time

import pytest

from wellfed.nvml.deadline import START_S, NvmlStuckError, within
from wellfed.nvml.session import GpuLostError, NvmlAbsentError


def test_what_comes_in_time_is_handed_on():
    assert within(30, lambda: [1, 2]) == [1, 2]
    assert within(30, lambda: None) is None
    assert START_S > 1


def test_what_is_raised_in_time_is_raised_here():
    def fail():
        raise GpuLostError("nvmlInit")

    with pytest.raises(GpuLostError, match="NVML nvmlInit: GPU is lost"):
        within(30, fail)


def test_what_does_not_come_back_is_left_behind():
    gate, came_back = threading.Event(), threading.Event()

    def hang():
        gate.wait(30)
        came_back.set()
        raise GpuLostError("nvmlInit")  # nobody hears of it

    began_at_s = time.monotonic()
    with pytest.raises(NvmlStuckError, match=r"NVML driver: did not answer within 0\.03 s") as caught:
        within(0.03, hang)
    assert time.monotonic() - began_at_s < 15
    assert isinstance(caught.value, NvmlAbsentError)
    assert not came_back.is_set()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "wellfed-nvml")
    assert thread.daemon  # nor does the process wait for it
    gate.set()
    thread.join(20)
    assert came_back.is_set()
