"""Finds the longest of the first batches of an epoch: where samples differ in length, it decides what fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

MOST_BATCHES, MOST_S = 32, 0.5
"""At most so many, or about so long; at least two."""
ALIKE_S = 0.05
"""The same while all are of one size: images that are slow to read are not waited for."""


@dataclass(frozen=True)
class Longest:
    """The batch with the most bytes a sample, and among which it was found."""

    batch: Batch
    num_batches: int
    shortest_bytes: float
    """A sample's, in the batch that has the fewest."""
    longest_bytes: float
    """The same in ``batch``."""

    @property
    def is_longer(self) -> bool:
        """Not all batches were of one size."""
        return self.longest_bytes > self.shortest_bytes


def longest_batch(deliveries: Iterator[Delivery], clock: Callable[[], float] = time.perf_counter) -> Longest:
    """Looks at 2, 4, 8 ... batches while twice as many are expected to stay within the time.

    Steps so wide have the same batches looked at in every run, unless a machine's speed is near one of their edges.
    Bytes count, not one dimension: tensors that are padded to the same length (tokens and their mask) grow together.

    Raises:
        Exception: the first batch could not be built. A later one that can't ends the look: training will tell.
    """
    first = next(deliveries)
    began_s = clock()  # not before: the first batch waits until its workers have started
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
