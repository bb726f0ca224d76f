"""Composes each list of overrides once for all tests of a process. Each test gets a copy of its own."""

import pickle
from collections.abc import Sequence
from functools import cache

from wellfed.config import compose as app
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig


def compose(overrides: Sequence[str] = ()) -> Composed[RunConfig]:
    """Returns what `wellfed.config.compose.compose` does for a training."""
    found: Composed[RunConfig] = pickle.loads(_pickled(tuple(overrides)))
    return found


@cache
def _pickled(overrides: tuple[str, ...]) -> bytes:
    return pickle.dumps(app.compose(overrides))
