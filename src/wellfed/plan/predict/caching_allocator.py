"""Simulates what torch's CUDA allocator reserves of a card for a sequence of allocations and frees, without torch.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13, default settings).
Memory is asked of the driver in segments and given out in blocks; what is freed is kept and joined with free
neighbours of its segment. Blocks of different streams, and small ones and large ones, never come from the same segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MIN_BLOCK = 512
"""Requests are rounded up to multiples of it (kMinBlockSize)."""
SMALL = 2**20
"""Requests up to here are small (kSmallSize)."""
SMALL_SEGMENT = 2 * 2**20
"""Segment for small requests (kSmallBuffer)."""
MEDIUM_BELOW = 10 * 2**20
"""Larger requests below it get a segment of ``MEDIUM_SEGMENT`` (kMinLargeAlloc)."""
MEDIUM_SEGMENT = 20 * 2**20
"""large_segment_size."""
ROUND_LARGE = 2 * 2**20
"""From ``MEDIUM_BELOW`` on a segment is the request, rounded up to a multiple of it (kRoundLarge)."""
EXPANDABLE_SPACE = 2**50
"""Addresses that an expandable segment may grow into: more than any card has."""


class OutOfMemory(Exception):
    """A request does not fit within the limit, even after cached segments went back to the driver."""


@dataclass(eq=False, repr=False)
class _Block:
    """Successive bytes of a segment, in use or free; neighbours are linked."""

    pool: _Pool
    address: int
    size: int
    asked: int = 0
    """Of ``size``, where it is in use; the rest was too little to be split off."""
    before: _Block | None = None
    after: _Block | None = None
    is_used: bool = False
    is_mapped: bool = True
    """Of an expandable segment: memory of the card stands behind the addresses."""

    def link(self, before: _Block | None, after: _Block | None) -> None:
        """Put it between two others."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


@dataclass(eq=False)
class _Pool:
    """Small or large blocks of one stream."""

    is_small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    """In the order of the search: the smallest first, then the lowest address."""
    unmapped: _Block | None = None
    """The rest of an expandable segment."""

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def smallest(self, size: int) -> _Block | None:
        """The smallest free block of at least so many bytes."""
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        block = self.free[place][-1]
        if block.after is not None and not block.after.is_mapped and place + 1 < len(self.free):
            return self.free[place + 1][-1]  # the end of an expandable segment counts as large as it may become
        return block


class CachingAllocator:
    """One card's. Sizes are bytes; a block is named by the address that `allocate` gave.

    Args:
        limit_bytes: what may be reserved; None = any.
        expandable: ``expandable_segments:True``: one segment for each stream and pool, which grows by pages.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.asked = self.allocated = self.reserved = 0
        """Bytes of requests, rounded; of blocks in use; of segments."""
        self.peak_asked = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """Requests for which cached segments had to go back to the driver."""
        self._limit, self._expandable = limit_bytes, expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """The address of a block for a request above 0.

        Raises:
            OutOfMemory: see there.
        """
        size = rounded(num_bytes)
        pool = self._pools.setdefault((stream, size <= SMALL), _Pool(size <= SMALL))
        block = pool.smallest(size) or (self._grown if self._expandable else self._new_segment)(pool, size)
        pool.remove(block)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.is_small or self._expandable else rest > SMALL:
            other = _Block(pool, block.address + size, rest)
            other.link(block, block.after)
            block.size = size
            pool.add(other)
        block.is_used, block.asked = True, size
        self._used[block.address] = block
        self.asked += size
        self.allocated += block.size
        self.peak_asked = max(self.peak_asked, self.asked)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Give a block back to its pool.

        Raises:
            KeyError: no block in use has this address.
        """
        block = self._used.pop(address)
        block.is_used = False
        self.allocated -= block.size
        self.asked -= block.asked
        self._join(block)

    def release_cached(self) -> None:
        """Segments that are free as a whole go back to the driver (``torch.cuda.empty_cache``)."""
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                unmapped = pool.unmapped
                # Of an expandable segment the pages that end it. (torch gives back those between blocks too.)
                if block.after is unmapped and (unmapped is not None or block.before is None):
                    pool.remove(block)
                    self.reserved -= block.size
                    if unmapped is not None:
                        unmapped.address, unmapped.size = block.address, unmapped.size + block.size
                        unmapped.link(block.before, None)

    # -- segments -------------------------------------------------------------------------------------------------

    def _reserve(self, missing: Callable[[], int]) -> int:
        """Ask the driver for what is missing, which may be more once cached segments went back."""
        num_bytes = missing()
        if self._limit is not None and self.reserved + num_bytes > self._limit:
            self.retries += 1
            self.release_cached()
            num_bytes = missing()
            if self.reserved + num_bytes > self._limit:
                raise OutOfMemory(f"{num_bytes} bytes beside {self.reserved} of {self._limit}")
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return num_bytes

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        segment = self._reserve(lambda: segment_size(size))
        block = _Block(pool, self._next_address, segment)
        self._next_address += segment
        pool.add(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """The last free block of an expandable segment, with as many pages more as the request needs."""
        page = SMALL_SEGMENT if pool.is_small else MEDIUM_SEGMENT
        if pool.unmapped is None:
            pool.unmapped = _Block(pool, self._next_address, EXPANDABLE_SPACE, is_mapped=False)
            self._next_address += EXPANDABLE_SPACE
        unmapped = pool.unmapped

        def missing() -> int:
            last = unmapped.before
            there = last.size if last is not None and not last.is_used else 0
            return -(-(size - there) // page) * page

        pages = self._reserve(missing)
        new = _Block(pool, unmapped.address, pages)
        new.link(unmapped.before, unmapped)
        unmapped.address, unmapped.size = unmapped.address + pages, unmapped.size - pages
        return self._join(new)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _join(self, block: _Block) -> _Block:
        """The block with its free neighbours, in its pool."""
        for other in (block.before, block.after):
            if other is None or other.is_used or not other.is_mapped:
                continue
            block.pool.remove(other)
            first, second = (other, block) if other is block.before else (block, other)
            block.address, block.size = first.address, first.size + second.size
            block.link(first.before, second.after)
        block.pool.add(block)
        return block


def rounded(num_bytes: int) -> int:
    """A request's block: the next multiple of ``MIN_BLOCK``, at least one."""
    return max(1, -(-num_bytes // MIN_BLOCK)) * MIN_BLOCK


def segment_size(size: int) -> int:
    """What is asked of the driver for a block that no free one holds."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM_BELOW else -(-size // ROUND_LARGE) * ROUND_LARGE


def reserved_for(sizes: Sequence[int], *, expandable: bool = False) -> int:
    """What is reserved where these are allocated one after the other and stay."""
    allocator = CachingAllocator(expandable=expandable)
    for size in filter(None, sizes):
        allocator.allocate(size)
    return allocator.reserved
