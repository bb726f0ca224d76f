"""Streams and events of the simulated cards, and what comes of it when they are not made to wait for each other."""

import pytest
import torch

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""


def violations() -> list[str]:
    import fake_cuda

    return fake_cuda.driver.violations()


def on_side_stream(host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        return host.to("cuda", non_blocking=True), stream


@pytest.mark.simulated
def test_who_reads_before_the_copy_reads_garbage() -> None:
    moved, stream = on_side_stream(torch.ones(4).pin_memory())
    assert moved.sum().isnan()
    assert "may still be writing" in violations()[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert moved.sum() == 4
    assert violations() == []


@pytest.mark.simulated
@pytest.mark.parametrize("waits", ["stream", "event", "synchronize", "event.synchronize", "query"])
def test_every_way_to_wait_is_one(waits: str) -> None:
    moved, stream = on_side_stream(torch.ones(4).pin_memory())
    done = stream.record_event()
    match waits:
        case "stream":
            torch.cuda.current_stream().wait_stream(stream)
        case "event":
            torch.cuda.current_stream().wait_event(done)
        case "synchronize":
            torch.cuda.synchronize()
        case "event.synchronize":
            done.synchronize()
        case "query":
            assert done.query()
    assert moved.sum() == 4
    assert violations() == []


@pytest.mark.simulated
def test_a_pinned_buffer_that_is_used_again_too_soon_is_seen() -> None:
    host = torch.ones(4).pin_memory()
    moved = host.to("cuda", non_blocking=True)
    host.zero_()
    assert moved.sum() == 0


@pytest.mark.simulated
@pytest.mark.parametrize("records", [True, False])
def test_memory_of_another_stream_is_to_be_recorded(records: bool) -> None:
    moved, stream = on_side_stream(torch.ones(4).pin_memory())
    torch.cuda.current_stream().wait_stream(stream)
    moved + 1
    if records:
        moved.record_stream(torch.cuda.current_stream())
    del moved
    assert bool(violations()) is not records
