from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.plan.predict.caching_allocator import CachingAllocator, OutOfMemory, reserved_for, rounded, segment_size

MIB = 2**20


@pytest.mark.parametrize(
    ("request_", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
        (25 * MIB + 1, 25 * MIB + 512, 26 * MIB),
    ],
)
def test_sizes(request_, block, segment):
    assert rounded(request_) == block
    assert segment_size(block) == segment
    allocator = CachingAllocator()
    allocator.allocate(request_)
    assert allocator.reserved == segment
    # What is left of a large segment stays with the block, up to 1 MiB of it.
    is_split = segment - block >= 512 if block <= MIB else segment - block > MIB
    assert allocator.allocated == (block if is_split else segment)


def test_small_ones_share_a_segment_until_it_is_full():
    assert reserved_for([MIB, MIB]) == 2 * MIB
    assert reserved_for([MIB, MIB, 1]) == 4 * MIB
    assert reserved_for([5 * MIB] * 4) == 20 * MIB
    assert reserved_for([5 * MIB] * 5) == 40 * MIB
    assert reserved_for([7 * MIB] * 3) == 40 * MIB  # 6 MiB of the first are left
    assert reserved_for([]) == reserved_for([0]) == 0


def test_the_smallest_that_holds_it_is_used_again():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(29 * MIB + 1) == small
    assert allocator.allocate(30 * MIB) == large
    assert allocator.reserved == 70 * MIB


def test_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB


def test_cached_segments_go_back_at_the_limit_and_split_ones_stay():
    allocator = CachingAllocator(60 * MIB)
    kept, freed = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.free(freed)
    allocator.free(allocator.allocate(30 * MIB))
    assert (allocator.reserved, allocator.retries) == (50 * MIB, 0)
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    with pytest.raises(OutOfMemory, match="2097152 bytes beside"):
        allocator.allocate(1)
    allocator.free(kept)
    allocator.release_cached()
    assert allocator.reserved == 40 * MIB


def test_an_expandable_segment_grows_where_others_would_be_added():
    """Growing batches leave a segment of each size behind, unless it can grow."""
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (plain, expandable):
        for size in (30, 40, 50):
            allocator.free(allocator.allocate(size * MIB))
    assert plain.reserved == 120 * MIB
    assert expandable.reserved == 60 * MIB  # pages of 20 MiB
    expandable.release_cached()
    assert expandable.reserved == 0
    assert reserved_for([1, 3 * MIB], expandable=True) == 22 * MIB


def test_pages_at_the_end_of_an_expandable_segment_go_back():
    allocator = CachingAllocator(100 * MIB, expandable=True)
    first, second = allocator.allocate(20 * MIB), allocator.allocate(60 * MIB)
    allocator.free(second)
    allocator.allocate(30 * MIB, stream=1)
    assert (allocator.retries, allocator.reserved) == (1, 60 * MIB)
    allocator.free(first)
    with pytest.raises(KeyError):
        allocator.free(first)


requests = st.lists(
    st.one_of(
        st.tuples(
            st.just("allocate"),
            st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 64 * MIB)),
            st.integers(0, 1),
        ),
        st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0)),
        st.tuples(st.just("release"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


@given(steps=requests, expandable=st.booleans(), limit=st.sampled_from([None, 150 * MIB]))
def test_whatever_is_asked(steps, expandable, limit):
    allocator = CachingAllocator(limit, expandable=expandable)
    live: list[int] = []
    for kind, number, stream in steps:
        if kind == "allocate":
            before = allocator.reserved, allocator.allocated
            try:
                live.append(allocator.allocate(number, stream))
            except OutOfMemory:
                assert allocator.reserved <= before[0]
                assert allocator.allocated == before[1]
                assert before[0] + number > limit - 20 * MIB
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        else:
            allocator.release_cached()
        check(allocator, live, limit)
    for address in live:
        allocator.free(address)
    assert allocator.allocated == 0
    if not expandable:
        assert sum(size for _, size in free_blocks(allocator)) == allocator.reserved
    allocator.release_cached()
    assert allocator.reserved == 0
    assert free_blocks(allocator) == []


def free_blocks(allocator):
    """Address and size of each block that waits to be used again."""
    return [(block.address, block.size) for pool in allocator._pools.values() for *_, block in pool.free]


def check(allocator, live, limit):
    used, free = [(at, block.size) for at, block in allocator._used.items()], free_blocks(allocator)
    assert sorted(address for address, _ in used) == sorted(live)
    assert sum(size for _, size in used) == allocator.allocated
    assert allocator.allocated + sum(size for _, size in free) == allocator.reserved
    assert limit is None or allocator.reserved <= limit
    assert allocator.peak_reserved >= allocator.peak_allocated >= allocator.peak_asked
    assert allocator.allocated - len(live) * MIB <= allocator.asked <= allocator.allocated
    assert allocator.peak_reserved >= allocator.reserved
    blocks = sorted([*used, *free])
    for (address, size), (after, _) in pairwise(blocks):
        assert address + size <= after  # no two overlap


@given(sizes=st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=30), order=st.randoms())
def test_what_is_freed_becomes_one_block_a_segment(sizes, order):
    allocator = CachingAllocator()
    live = [allocator.allocate(size) for size in sizes]
    order.shuffle(live)
    for address in live:
        allocator.free(address)
    for _, size in free_blocks(allocator):
        assert size == 2 * MIB or size == 20 * MIB or (size >= 10 * MIB and size % (2 * MIB) == 0)
