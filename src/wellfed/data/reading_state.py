"""Saves what the draws of a user's loaders depend on, so that a resumed run reads the same batches again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from wellfed import generators

_HOST = torch.device("cpu")
_FEW = 8
"""Readings after which a loader that has drawn nothing counts as one that draws nothing."""


def states_of(loaders: Any) -> dict[str, Any]:
    """Returns the states of the process's generators and of those that loaders hold, as plain values.

    With ``workers_stay`` a loader has workers, which draw no new seed for another epoch.

    Args:
        loaders: a loader, or a list of them.
    """
    listed = loaders if isinstance(loaders, list) else [loaders]
    stay = any(isinstance(one, DataLoader) and one._iterator is not None for one in listed)
    held = [generators.state_of(each) for each in generators.held_by(loaders)]
    return {"rng": generators.state(_HOST), "held": held, "workers_stay": stay}


def restore_states(loaders: Any, saved: Mapping[str, Any]) -> None:
    """Restores the result of `states_of`, or a part of it: ``rng``, ``held``."""
    for generator, state in zip(generators.held_by(loaders), saved.get("held") or (), strict=False):
        generators.set_state(generator, state)
    if saved.get("rng") is not None:
        generators.restore(saved["rng"], _HOST)


class BeforeReading:
    """State of the process's generators before the latest batch of a loader that is read a batch ahead.

    Steps draw from the same generators. So a resumed run draws the batch that had been read ahead from this state.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        """None = reading draws nothing."""
        self._num, self._draws = 0, False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Returns a context for the reading of one batch. Takes 0.1 ms while batches draw, else nothing."""
        if not self._draws and self._num >= _FEW:
            yield
            return
        self._num += 1
        self.state, before = generators.state(_HOST), None if self._draws else generators.numbers()
        try:
            yield
        finally:
            self._draws = self._draws or generators.numbers() != before
            if not self._draws:
                self.state = None
