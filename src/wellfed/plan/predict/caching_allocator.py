"""Simulates the memory that torch's CUDA allocator reserves for a sequence of allocations and frees, without torch.

It follows c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13, default settings). The
allocator requests segments from the driver and divides them into blocks. A freed block is kept and joined with free
neighbours of its segment. Blocks of different streams never share a segment, nor do small and large blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MIN_BLOCK = 512
"""Requests are rounded up to a multiple of these bytes (kMinBlockSize)."""
SMALL = 2**20
"""Largest small request in bytes (kSmallSize)."""
SMALL_SEGMENT = 2 * 2**20
"""Bytes of a segment for small requests (kSmallBuffer)."""
MEDIUM_BELOW = 10 * 2**20
"""Bytes below which requests above `SMALL` get a segment of ``MEDIUM_SEGMENT`` (kMinLargeAlloc)."""
MEDIUM_SEGMENT = 20 * 2**20
"""Bytes of a segment for medium requests (large_segment_size)."""
ROUND_LARGE = 2 * 2**20
"""Segments of larger requests are rounded up to a multiple of these bytes (kRoundLarge)."""
EXPANDABLE_SPACE = 2**50
"""Addresses of an expandable segment, more than the memory of any card."""


class OutOfMemory(Exception):
    """Raised for a request that exceeds the limit even without cached segments."""


@dataclass(eq=False, repr=False)
class _Block:
    """Successive bytes of a segment, used or free, linked to their neighbours."""

    pool: _Pool
    address: int
    size: int
    asked: int = 0
    """Requested bytes of ``size``; the rest was too small to split off."""
    before: _Block | None = None
    after: _Block | None = None
    is_used: bool = False
    is_mapped: bool = True
    """Whether the addresses have memory; False only in expandable segments."""

    def link(self, before: _Block | None, after: _Block | None) -> None:
        """Links the block between two others."""
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
    """Free blocks, the smallest first, then the lowest address."""
    unmapped: _Block | None = None
    """The unmapped rest of an expandable segment."""

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def smallest(self, size: int) -> _Block | None:
        """Returns the smallest free block of at least ``size`` bytes."""
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        block = self.free[place][-1]
        if block.after is not None and not block.after.is_mapped and place + 1 < len(self.free):
            return self.free[place + 1][-1]  # the end of an expandable segment counts with its possible size
        return block


class CachingAllocator:
    """The allocator of one card. Sizes are bytes; a block is identified by the address that `allocate` returned.

    Args:
        limit_bytes: maximum bytes reserved; None = no limit.
        expandable: as ``expandable_segments:True``: one segment per stream and pool, which grows by pages.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.asked = self.allocated = self.reserved = 0
        """Bytes of rounded requests, of blocks in use, and of segments."""
        self.peak_asked = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """Number of requests for which cached segments were returned to the driver."""
        self._limit, self._expandable = limit_bytes, expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """Returns the address of a block for a request above 0.

        Raises:
            OutOfMemory: the request exceeds the limit.
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
        """Returns a block to its pool.

        Raises:
            KeyError: no block in use has this address.
        """
        block = self._used.pop(address)
        block.is_used = False
        self.allocated -= block.size
        self.asked -= block.asked
        self._join(block)

    def release_cached(self) -> None:
        """Returns free segments to the driver (``torch.cuda.empty_cache``)."""
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                unmapped = pool.unmapped
                # From an expandable segment only pages at its end (torch also returns pages between blocks).
                if block.after is unmapped and (unmapped is not None or block.before is None):
                    pool.remove(block)
                    self.reserved -= block.size
                    if unmapped is not None:
                        unmapped.address, unmapped.size = block.address, unmapped.size + block.size
                        unmapped.link(block.before, None)

    def _reserve(self, missing: Callable[[], int]) -> int:
        """Requests missing bytes from the driver; ``missing`` is called again after cached segments were returned."""
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
        """Returns the last free block of an expandable segment, grown by the pages for the request."""
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

    def _join(self, block: _Block) -> _Block:
        """Joins a block with its free neighbours, adds it to its pool and returns it."""
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
    """Returns the block size of a request: the next multiple of ``MIN_BLOCK``, at least one."""
    return max(1, -(-num_bytes // MIN_BLOCK)) * MIN_BLOCK


def segment_size(size: int) -> int:
    """Returns the size of the segment to request from the driver for a block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM_BELOW else -(-size // ROUND_LARGE) * ROUND_LARGE


def reserved_for(sizes: Sequence[int], *, expandable: bool = False) -> int:
    """Returns the bytes reserved after these allocations in a row."""
    allocator = CachingAllocator(expandable=expandable)
    for size in filter(None, sizes):
        allocator.allocate(size)
    return allocator.reserved
