"""Metrics on the test split: ``python src/evaluate.py checkpoint=<file>``; ``--help`` tells the rest."""

from __future__ import annotations

import sys

from wellfed.config.compose import Composed
from wellfed.config.entry import main
from wellfed.config.quoting import quoted
from wellfed.config.schema import EvaluateConfig


def job(composed: Composed[EvaluateConfig]) -> int:
    """One evaluation; its exit code."""
    from wellfed.commands.evaluate import evaluate

    return evaluate(composed)


def quote_paths(overrides: list[str]) -> list[str]:
    """The command line, with paths that Hydra's grammar would stumble over in quotes."""
    return [quoted(text) for text in overrides]


if __name__ == "__main__":
    sys.exit(main("evaluate", job, expand=quote_paths))
