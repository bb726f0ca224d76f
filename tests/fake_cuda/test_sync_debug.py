"""torch.cuda.set_sync_debug_mode names the lines that wait for a simulated card, as a CUDA build of torch does."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

SAYS = "called a synchronizing CUDA operation"
pytestmark = [
    pytest.mark.slow,  # of the simulated cards by themselves; tests of what runs on them are not
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def lines_that_wait(call: Callable[[torch.Tensor], object]) -> list[tuple[str, int]]:
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(x)
    torch.cuda.set_sync_debug_mode(0)
    return [(each.filename, each.lineno) for each in caught if str(each.message).startswith(SAYS)]


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "to the card": lambda x: torch.ones(2).to("cuda"),
    "nonzero": lambda x: x.nonzero(),
    "if": lambda x: bool(x[0] > 0),
    "mask": lambda x: x[x > 0],
    "mask written": lambda x: x.__setitem__(x > 0, x[0]),
    "indices of the host": lambda x: x[torch.tensor([0, 1])],
    "equal": lambda x: x.equal(x + 1),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}
DOES_NOT: dict[str, Callable[[torch.Tensor], object]] = {
    "kernel": lambda x: x + 1,
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "queued to the card": lambda x: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
    "queued to the host": lambda x: x.to("cpu", non_blocking=True),
    "number under a mask": lambda x: x.__setitem__(x > 0, 1.0),
    "indices": lambda x: x[torch.arange(2, device="cuda")],
}


@pytest.mark.simulated
def test_lines_that_wait_are_named() -> None:
    for name, call in WAITS.items():
        assert set(lines_that_wait(call)) == {(__file__, call.__code__.co_firstlineno)}, name
    for name, call in DOES_NOT.items():
        assert lines_that_wait(call) == [], name


@pytest.mark.simulated
def test_a_wait_can_be_an_error_that_leaves_nothing_done() -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    for call in WAITS.values():
        with pytest.raises(RuntimeError, match=SAYS):
            call(x)
    for call in DOES_NOT.values():
        call(x)
    torch.cuda.set_sync_debug_mode("default")
    assert x.tolist() == [1, 1, 1, 1]


@pytest.mark.simulated
def test_the_mode_warns_of_itself_once() -> None:
    with pytest.warns(UserWarning, match="prototype feature"):
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.set_sync_debug_mode("warn")
