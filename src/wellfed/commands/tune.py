"""Finds faster settings (``wellfed tune``, ``python src/tune.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from wellfed.config import entry
from wellfed.config.compose import Composed
from wellfed.config.schema import TuneRunConfig
from wellfed.trials.tune_words import NOT_MANY, expand


def main(argv: Sequence[str]) -> int:
    """Composes and checks the start before torch is imported, then tunes; returns the exit code."""
    return entry.main("tune", _tune, [*argv], expand=expand, not_many=NOT_MANY)


def _tune(composed: Composed[TuneRunConfig]) -> int:
    from wellfed.trials.tuning import tune

    return tune(composed)
