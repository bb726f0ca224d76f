"""Memory of a simulated card is handed out, split, joined, kept and released as torch's CUDA allocator does it."""

import pytest
import torch

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""

MIB = 1 << 20


def take(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def reserved() -> int:
    return torch.cuda.memory_reserved()


def stat(name: str) -> int:
    return torch.cuda.memory_stats()[name]


def segments() -> list[dict]:
    return torch.cuda.memory_snapshot()


def blocks() -> list[list[tuple[int, bool]]]:
    """Of each segment: (bytes, in use)."""
    return [[(block["size"], block["state"] != "inactive") for block in segment["blocks"]] for segment in segments()]


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("asked", "allocated", "of_segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB + 1, 22 * MIB, 22 * MIB),  # too little to split off
    ],
)
def test_sizes_are_rounded_and_segments_are_of_three_kinds(asked: int, allocated: int, of_segment: int) -> None:
    held = take(asked)
    assert torch.cuda.memory_allocated() == allocated
    assert reserved() == of_segment
    assert stat("requested_bytes.all.current") == asked == held.nbytes
    pool = "small" if of_segment == 2 * MIB else "large"
    assert segments()[0]["segment_type"] == pool
    assert stat(f"reserved_bytes.{pool}_pool.current") == of_segment


@pytest.mark.simulated
def test_free_neighbours_become_one_block() -> None:
    held = [take(4 * MIB) for _ in range(5)]
    assert blocks() == [[(4 * MIB, True)] * 5]
    del held[3], held[1]
    assert blocks() == [[(4 * MIB, True), (4 * MIB, False), (4 * MIB, True), (4 * MIB, False), (4 * MIB, True)]]
    del held[1]
    assert blocks() == [[(4 * MIB, True), (12 * MIB, False), (4 * MIB, True)]]
    held.append(take(12 * MIB))
    assert reserved() == 20 * MIB
    held.clear()
    assert blocks() == [[(20 * MIB, False)]]
    assert stat("inactive_split.all.current") == 0


@pytest.mark.simulated
def test_empty_cache_gives_whole_segments_back() -> None:
    kept, freed = take(4 * MIB), take(30 * MIB)
    del freed
    assert reserved() == 50 * MIB
    torch.cuda.empty_cache()
    assert reserved() == 20 * MIB
    assert torch.cuda.mem_get_info()[0] == 1024 * MIB - 20 * MIB
    assert [stat(f"num_device_{what}") for what in ("alloc", "free")] == [2, 1]
    del kept
    torch.cuda.empty_cache()
    assert reserved() == 0
    assert stat("segment.all.current") == 0


@pytest.mark.simulated(mib=100)
def test_cached_segments_make_way_before_memory_is_out() -> None:
    held = [take(30 * MIB) for _ in range(3)]
    held.pop()
    held.append(take(40 * MIB))
    assert reserved() == 100 * MIB
    assert stat("num_alloc_retries") == 1
    with pytest.raises(torch.OutOfMemoryError) as caught:
        take(12 * MIB)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 100.00 MiB of which 0 bytes is "
        "free. Including non-PyTorch memory, this process has 100.00 MiB memory in use. Of the allocated memory "
        "100.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert stat("num_ooms") == 1
    del held[0]
    assert take(12 * MIB).nbytes == 12 * MIB  # it goes on


@pytest.mark.simulated(mib=1000)
def test_a_process_may_be_given_a_share() -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.OutOfMemoryError, match="100.00 MiB allowed"):
        take(101 * MIB)
    assert take(100 * MIB).nbytes == reserved()
    assert torch.cuda.get_per_process_memory_fraction() == 0.1


@pytest.mark.simulated(kernel_us=50_000)
def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    held, stream = take(4 * MIB), torch.cuda.Stream()
    address = held.data_ptr()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        held.add(1)  # takes 50 ms
    held.record_stream(stream)
    del held
    assert [stat(f"{what}_bytes.all.current") for what in ("allocated", "active")] == [0, 4 * MIB]
    assert take(4 * MIB).data_ptr() != address
    torch.cuda.synchronize()
    assert take(4 * MIB).data_ptr() == address


@pytest.mark.simulated
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_grow_by_pages(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True")  # read when memory is first asked for
    first = take(13 * MIB)
    assert reserved() == 20 * MIB
    second = take(30 * MIB)
    assert reserved() == 60 * MIB  # 13 + 30 in one segment
    assert second.data_ptr() == first.data_ptr() + 13 * MIB
    assert stat("segment.all.current") == 0  # torch counts none of these
    assert [(s["is_expandable"], s["total_size"]) for s in segments()] == [(True, 60 * MIB)]
    del second
    torch.cuda.empty_cache()
    assert reserved() == 20 * MIB
    del first
    torch.cuda.empty_cache()
    assert reserved() == 0


@pytest.mark.simulated(mib=20_000)
def test_a_large_card_takes_the_host_only_what_is_written() -> None:
    def resident_mib() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / MIB

    before = resident_mib()
    held = torch.empty(4_000 * MIB, device="cuda")  # 16 GB
    assert torch.cuda.memory_allocated() == 16_000 * MIB
    assert resident_mib() - before < 400
    assert held[:1000].isnan().all()
    assert held[-1000:].isnan().all()
