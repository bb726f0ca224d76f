"""Finds the largest of the first batches of an epoch, which decides what fits if samples differ in length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

NUM_BATCHES = 8


def longest_batch(deliveries: Iterator[Delivery]) -> tuple[Batch, list[float]]:
    """Returns the batch with the most bytes per sample of the first ones, and the bytes per sample of each of them.

    Sizes are compared in bytes: tokens and their mask grow together.
    """
    found = [(batches.num_bytes(one.batch) / one.total, one.batch) for one in islice(deliveries, NUM_BATCHES)]
    return max(found, key=lambda each: each[0])[1], [size for size, _ in found]
