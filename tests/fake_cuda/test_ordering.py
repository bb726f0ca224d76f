"""Streams and events of the simulated cards, and what comes of it when they are not made to wait for each other."""

import time

import pytest
import torch
from torch import nn

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
def test_a_pageable_source_may_change_at_once() -> None:
    host = torch.ones(4)
    moved = host.to("cuda", non_blocking=True)
    host.zero_()
    assert moved.sum() == 4


@pytest.mark.simulated
def test_the_host_reads_a_pinned_target_too_early() -> None:
    target, card = torch.zeros(4).pin_memory(), torch.ones(4, device="cuda")
    target.copy_(card, non_blocking=True)
    assert target.sum() == 0
    torch.cuda.synchronize()
    assert target.sum() == 4


@pytest.mark.simulated
def test_a_copy_to_the_host_comes_before_its_source_is_used_again() -> None:
    target, card = torch.zeros(4).pin_memory(), torch.ones(4, device="cuda")
    address = card.data_ptr()
    target.copy_(card, non_blocking=True)
    del card
    assert torch.empty(4, device="cuda").data_ptr() == address  # handed out again, on the same stream
    torch.cuda.synchronize()
    assert target.tolist() == [1] * 4


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


@pytest.mark.simulated
def test_a_target_that_is_still_read_may_not_be_written() -> None:
    held, stream = torch.ones(4, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        held + 1
    held.zero_()
    assert "may still be reading" in violations()[0]


@pytest.mark.simulated(strict=True)
def test_strict_cards_raise_at_once() -> None:
    moved, _ = on_side_stream(torch.ones(4).pin_memory())
    with pytest.raises(RuntimeError, match="may still be writing"):
        moved.sum()


@pytest.mark.simulated(kernel_us=10_000)
def test_a_slow_card_runs_behind_the_host() -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    held = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    first.record()
    began_s = time.monotonic()
    for _ in range(20):
        held += 1
    last.record()
    host_ms = 1e3 * (time.monotonic() - began_s)
    assert not last.query()
    with pytest.raises(RuntimeError, match="device not ready"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 200 > 2 * host_ms


@pytest.mark.simulated(launch_us=10_000)
def test_a_launch_takes_the_hosts_time_and_not_the_cards() -> None:
    import fake_cuda

    held, host = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()
    torch.cuda.synchronize()
    before, began_ns, worked_ns = fake_cuda.driver.counts()["launches"], time.monotonic_ns(), -time.thread_time_ns()
    for _ in range(10):
        held += 1
        held.copy_(host, non_blocking=True)
    worked_ns += time.thread_time_ns()
    torch.cuda.synchronize()
    took_ns, launches = time.monotonic_ns() - began_ns, fake_cuda.driver.counts()["launches"] - before
    assert launches == 20
    assert took_ns >= launches * 10_000_000
    assert worked_ns > took_ns / 10  # it does not sleep
    assert fake_cuda.driver.busy_ns(0, began_ns, began_ns + took_ns) < took_ns / 2


@pytest.mark.simulated(copy_gbps=1, pageable_gbps=0.2)
@pytest.mark.parametrize(("is_pinned", "at_least_ms"), [(True, 20), (False, 100)])
def test_copies_take_their_time_beside_the_host(is_pinned: bool, at_least_ms: float) -> None:
    host = torch.ones(5_000_000)  # 20 MB
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    (host.pin_memory() if is_pinned else host).to("cuda", non_blocking=True)
    last.record()
    assert not last.query()
    last.synchronize()
    assert first.elapsed_time(last) > at_least_ms


@pytest.mark.simulated
def test_events_are_to_be_timed_and_recorded() -> None:
    timed, plain = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    timed.record()
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(plain)
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.cuda.Event(enable_timing=True))


@pytest.mark.simulated
def test_counts_tell_launches_waits_and_copies() -> None:
    import fake_cuda

    before = fake_cuda.driver.counts()
    card = torch.ones(4).to("cuda")
    card.add_(1)
    card.tolist()
    after = fake_cuda.driver.counts()
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {"launches": 3, "synchronisations": 2, "to_card": 1, "to_host": 1}


@pytest.mark.simulated(cards=2)
def test_copies_between_cards_are_ordered_by_themselves() -> None:
    first = torch.ones(4, device="cuda:0")
    second = first.to("cuda:1", non_blocking=True)
    assert (second + 1).sum() == 8
    first.zero_()
    assert violations() == []


@pytest.mark.simulated(cards=2)
def test_streams_belong_to_threads_and_cards() -> None:
    import threading

    side = torch.cuda.Stream(device="cuda:1")
    seen = []
    with torch.cuda.stream(side):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream("cuda:1")))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream("cuda:1")] != [side]
    assert torch.cuda.current_device() == 0


@pytest.mark.simulated
def test_the_cards_generator_is_its_own() -> None:
    torch.manual_seed(0)
    host, card = torch.get_rng_state(), torch.cuda.get_rng_state()
    drawn = nn.functional.dropout(torch.ones(100, device="cuda"))
    assert 0 < int((drawn == 0).sum()) < 100
    assert torch.equal(torch.get_rng_state(), host)
    torch.cuda.set_rng_state(card)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device="cuda")), drawn)
    own = torch.Generator("cuda").manual_seed(1)
    numbers = torch.rand(3, generator=own, device="cuda")
    assert torch.equal(torch.rand(3, generator=own.manual_seed(1), device="cuda"), numbers)
