"""Chooses how a run trains: by the engine's loop, or under Lightning's own Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellfed.run.objects.run_objects import RunObjects

if TYPE_CHECKING:
    from wellfed.run.passes.guest_passes import GuestPasses
    from wellfed.run.passes.plain_passes import PlainPasses


def passes_class(objects: RunObjects) -> type[GuestPasses | PlainPasses]:
    """Returns the class of a run's passes. Imports Lightning's Trainer for guests alone."""
    if objects.guest is None:
        from wellfed.run.passes.plain_passes import PlainPasses

        return PlainPasses
    from wellfed.run.passes.guest_passes import GuestPasses

    return GuestPasses
