import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wellfed.plan.predict.memory_tracker import MemoryTracker


@pytest.fixture(params=["real", "fake"])
def mode(request):
    if request.param == "real":
        yield
    else:
        with FakeTensorMode():
            yield


@pytest.mark.usefixtures("mode")
def test_what_lives_and_its_peak():
    live = MemoryTracker()
    with live:
        first = torch.zeros(100)
        second = first + 1
        view = second[:10]
        first += 1
        assert live.live == {"activations": 800}
        del second
        assert live.live == {"activations": 800}  # the view keeps it
        del view
        assert live.live == {"activations": 400}
    assert live.peak == {"activations": 800}
    live.forget_peak()
    assert live.peak == {"activations": 400}
    del first
    assert live.live == {"activations": 0}  # also outside


@pytest.mark.usefixtures("mode")
def test_kinds():
    live = MemoryTracker()
    weight = torch.zeros(10, requires_grad=True)
    live.note([weight], "parameters")
    live.note([weight], "parameters")
    live.making = "temporaries"
    with live:
        made = weight * 2
    live.note([made], "inputs")
    assert live.live == {"parameters": 40, "temporaries": 0, "inputs": 40}
    assert live.peak == {"parameters": 40, "temporaries": 40}


@pytest.mark.usefixtures("mode")
def test_blocks():
    live = MemoryTracker(block_bytes=512)
    with live:
        made = [torch.empty(1), torch.empty(200)]
        assert live.live == {"activations": 512 + 1024}
    del made


def test_nothing_is_kept_alive():
    live = MemoryTracker()
    with live:
        made = torch.zeros(10)
    del live
    assert made.sum() == 0  # and its end calls nothing
    del made
