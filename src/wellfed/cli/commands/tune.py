"""Finds faster settings (``wellfed tune``, ``python src/tune.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from wellfed.command_line import set_words
from wellfed.config import entry
from wellfed.config.compose import Composed
from wellfed.config.schema import TuneRunConfig
from wellfed.study.tune.tune_words import NOT_MANY, expand


def main(argv: Sequence[str]) -> int:
    """Composes and checks the start before torch is imported, then tunes; returns the exit code."""
    if "--force" in argv:
        argv = ["tune.replace=true" if word == "--force" else word for word in argv]
        set_words(argv)
    return entry.main("tune", _tune, [*argv], expand=expand, not_many=NOT_MANY)


def _tune(composed: Composed[TuneRunConfig]) -> int:
    from wellfed.study.tune.tuning import tune

    return tune(composed)
