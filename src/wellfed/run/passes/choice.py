"""Chooses how a run trains."""

from __future__ import annotations

import os
from typing import Any

from wellfed.config.schema import RunConfig
from wellfed.plan.run_plan import RunPlan
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.passes.guest_passes import GuestPasses
from wellfed.run.passes.passes import Passes
from wellfed.run.passes.plain_passes import PlainPasses
from wellfed.train.loop.callbacks import Callback


def make_passes(
    config: RunConfig, objects: RunObjects, plan: RunPlan, books: Bookkeeper, **more: Any
) -> GuestPasses | PlainPasses | Passes:
    """Returns the passes of a run; ``more`` as for `PlainPasses`."""
    if objects.guest is not None:
        return GuestPasses(config, objects, plan, books, **more)
    is_plain = all(isinstance(one, Callback) for one in objects.callbacks.values())
    if is_plain and os.environ.get("WELLFED_LOOP") == "new":
        return PlainPasses(config, objects, plan, books, **more)
    return Passes(config, objects, plan, books, **more)
