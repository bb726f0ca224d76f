"""Find faster settings: ``python src/tune.py [overrides]``; ``--help`` tells the rest.

The start is composed and checked here, before torch is imported: a typo costs half a second.
"""

from __future__ import annotations

import sys

from wellfed.errors import in_environment

with in_environment():
    from wellfed.config.compose import Composed
    from wellfed.config.entry import main
    from wellfed.config.schema import TuneRunConfig
    from wellfed.trials.tune_words import NOT_MANY, expand


def job(composed: Composed[TuneRunConfig]) -> int:
    """One tune; its exit code."""
    from wellfed.trials.tuning import tune

    return tune(composed)


if __name__ == "__main__":
    sys.exit(main("tune", job, expand=expand, not_many=NOT_MANY))
