"""Metrics on the test split: ``python src/evaluate.py checkpoint=<file>``; ``--help`` tells the rest."""

from __future__ import annotations

import sys

from wellfed.errors import in_environment

with in_environment():
    from wellfed.config.compose import Composed
    from wellfed.config.entry import main
    from wellfed.config.quoting import quoted
    from wellfed.config.schema import EvaluateConfig


def job(composed: Composed[EvaluateConfig]) -> int:
    """One evaluation; its exit code."""
    from wellfed.commands.evaluate import evaluate

    return evaluate(composed)


if __name__ == "__main__":
    # Paths that Hydra's grammar would stumble over are put in quotes.
    sys.exit(main("evaluate", job, expand=lambda overrides, _: [quoted(text) for text in overrides]))
