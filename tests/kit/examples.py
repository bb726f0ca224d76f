"""Numbers of Hypothesis' examples."""

import os

from hypothesis import settings

_FACTOR = 4 if os.environ.get("HYPOTHESIS_PROFILE") == "fresh" else 1


def examples(number: int) -> settings:
    """Returns settings of this many examples in ``make test``, and of four times as many in ``make test-all``."""
    return settings(max_examples=_FACTOR * number)
