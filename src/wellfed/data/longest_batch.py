"""Finds the largest of the first batches of an epoch, which decides what fits if samples differ in length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

NUM_BATCHES = 8


@dataclass(frozen=True)
class Longest:
    """The batch with the most bytes per sample, and the batches compared with it."""

    batch: Batch
    num_batches: int
    shortest_bytes: float
    """Bytes per sample of the smallest batch."""
    longest_bytes: float
    """Bytes per sample of ``batch``."""


def longest_batch(deliveries: Iterator[Delivery]) -> Longest:
    """Returns the largest of the first batches. Sizes are compared in bytes: tokens and their mask grow together."""
    found = [(batches.num_bytes(one.batch) / one.total, one.batch) for one in islice(deliveries, NUM_BATCHES)]
    size, batch = max(found, key=lambda each: each[0])
    return Longest(batch, len(found), min(size for size, _ in found), size)
