"""Train, validate, test: ``python src/train.py [overrides]``; ``--help`` tells the rest.

The configuration is composed and checked here, before torch is imported: a typo costs half a second.
"""

from __future__ import annotations

import sys

from wellfed.errors import in_environment

with in_environment():
    from wellfed.config.entry import main
    from wellfed.run.launched import on_all_ranks
    from wellfed.run.resume import expand

if __name__ == "__main__":
    sys.exit(on_all_ranks(lambda job: main("train", job, expand=expand)))
