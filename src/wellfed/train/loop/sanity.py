"""Evaluates a few batches of a split before the first step, so that errors show at once."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from wellfed.batches import Delivery
from wellfed.observe.loggers.log_media import logged_to
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.memory.step_start import put_back


def try_split(model: PlacedModel, split: str, deliveries: Iterable[Delivery]) -> dict[str, float]:
    """Returns the metrics of these batches. Logs nothing; restores buffers, generators and metrics."""
    try:
        with put_back(model.whole, model.device, only_buffers=True), logged_to(None):
            return model.evaluate(split, list(deliveries), 0, merges=False)
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        # A metric may need the whole split.
        way_out = "; trainer.sanity_batches=0 tries none"
        needs_more = any(frame.f_code.co_name == "compute" for frame, _ in frames)
        error.add_note(f"in the {split} batches that are tried before training{way_out if needs_more else ''}")
        raise
    finally:
        model.evaluating.begin()
