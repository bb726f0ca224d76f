"""Evaluates a few batches of validation and test before the first step, so that errors show at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from wellfed.batches import Delivery
from wellfed.observe.loggers.log_media import logged_to
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.memory.step_start import put_back

Few = Callable[[], AbstractContextManager[Iterable[Delivery]]]
"""Function that opens a few batches of a split."""


def try_splits(
    model: PlacedModel,
    splits: Mapping[str, Few],
    found: Callable[[str, Mapping[str, float]], None],
) -> None:
    """Evaluates the batches of each split. Logs nothing; restores buffers, generators and metrics.

    Args:
        found: called with the metrics of each split.
    """
    for split, few in splits.items():
        try:
            with put_back(model.whole, model.device, only_buffers=True), logged_to(None), few() as deliveries:
                metrics = model.evaluate(split, list(deliveries), 0, merges=False)
        except Exception as error:
            frames = traceback.walk_tb(error.__traceback__)
            # A metric may need the whole split.
            way_out = "; trainer.sanity_batches=0 tries none"
            needs_more = any(frame.f_code.co_name == "compute" for frame, _ in frames)
            error.add_note(f"in the {split} batches that are tried before training{way_out if needs_more else ''}")
            raise
        finally:
            model.evaluating.begin()
        found(split, metrics)
