"""Train, validate, test: ``python src/train.py [overrides]``; ``--help`` tells the rest.

The configuration is composed and checked here, before torch is imported: a typo costs half a second.
"""

from __future__ import annotations

import sys

from wellfed.config.compose import Composed
from wellfed.config.entry import main
from wellfed.config.schema import RunConfig
from wellfed.run.resume import expand


def job(composed: Composed[RunConfig]) -> int:
    """One run; its exit code."""
    from wellfed.run.train import train

    return train(composed)


if __name__ == "__main__":
    sys.exit(main("train", job, expand=expand))
