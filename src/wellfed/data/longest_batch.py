"""Finds the largest of the first batches of an epoch, which decides what fits if samples differ in length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

MOST_BATCHES, MOST_S = 32, 0.5
"""Maximum number of batches and approximate maximum seconds; at least two batches are read."""
ALIKE_S = 0.05
"""Maximum seconds while all batches have one size, e.g. for slow images."""


@dataclass(frozen=True)
class Longest:
    """The batch with the most bytes per sample, and the batches compared with it."""

    batch: Batch
    num_batches: int
    shortest_bytes: float
    """Bytes per sample of the smallest batch."""
    longest_bytes: float
    """Bytes per sample of ``batch``."""

    @property
    def is_longer(self) -> bool:
        """Whether the batches differ in size."""
        return self.longest_bytes > self.shortest_bytes


def longest_batch(deliveries: Iterator[Delivery], clock: Callable[[], float] = time.perf_counter) -> Longest:
    """Reads 2, 4, 8 ... batches while doubling is expected to stay within the time; returns the largest.

    With doubling, all runs read the same batches unless the speed is near a limit. Sizes are compared in bytes, since
    tensors padded to the same length (tokens and their mask) grow together.

    Raises:
        Exception: the first batch could not be built. Errors of later batches end the search; training reports them.
    """
    first = next(deliveries)
    began_s = clock()  # after the first batch, which includes the start of its workers
    longest, sizes = first.batch, [_sample_bytes(first)]
    while len(sizes) < MOST_BATCHES:
        try:
            delivery = next(deliveries, None)
        except Exception:  # noqa: BLE001  foreign code
            break
        if delivery is None:
            break
        size = _sample_bytes(delivery)
        if size > max(sizes):
            longest = delivery.batch
        sizes.append(size)
        number = len(sizes)
        expected_s = (clock() - began_s) * (2 * number - 1) / (number - 1)
        if number.bit_count() == 1 and expected_s > (ALIKE_S if min(sizes) == max(sizes) else MOST_S):
            break
    return Longest(longest, len(sizes), min(sizes), max(sizes))


def _sample_bytes(delivery: Delivery) -> float:
    return batches.num_bytes(delivery.batch) / delivery.total
