"""Finds the largest of the first batches of an epoch, which decides what fits if samples differ in length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch

NUM_BATCHES = 8


def longest_batch(deliveries: Iterator[Delivery]) -> Batch:
    """Returns the batch with the most bytes per sample of the first ones: tokens and their mask grow together."""
    return max(islice(deliveries, NUM_BATCHES), key=lambda one: batches.num_bytes(one.batch) / one.total).batch
