"""Threads of one process on a simulated card."""

import threading

import pytest
import torch

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""


@pytest.mark.simulated(timeout_s=60)
def test_threads_that_copy_and_record_do_not_hold_each_other_up() -> None:
    # A tensor that Python knows takes Python's lock when it is kept; who waits for the card must not hold that lock.
    hosts = [torch.ones(64).pin_memory() for _ in range(8)]
    is_over = threading.Event()

    def copy() -> None:
        stream = torch.cuda.Stream()
        while not is_over.is_set():
            with torch.cuda.stream(stream):
                for host in hosts:
                    host.to("cuda", non_blocking=True)

    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        event = torch.cuda.Event()
        event.record()
        assert (torch.ones(8, device="cuda") * 2).device.type == "cuda"
        event.query()
    is_over.set()
    for thread in threads:
        thread.join()
