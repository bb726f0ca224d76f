"""Tells what has ended a command that leaves no record: the message alone, and the exit code."""

from __future__ import annotations

import os
import sys

from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OUT_OF_MEMORY, WellfedError

_BY_KIND = {"config": EXIT_NOTHING_RUN, "data": EXIT_NOTHING_RUN, "device_oom": EXIT_OUT_OF_MEMORY}
"""Exit codes."""


def tell(error: Exception, way_on: str = "") -> int:
    """Print what a user needs to know of an error; the exit code.

    Args:
        way_on: what can be typed where the card is the matter: lost, or too small.

    Raises:
        Exception: ``error`` itself, where a traceback helps.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if isinstance(error, WellfedError):
        more = way_on if error.kind == "device_oom" else ""
        print(f"{error}\n{more}".rstrip(), file=sys.stderr)
        return _BY_KIND.get(error.kind, EXIT_FAILED)
    if "torch" not in sys.modules:  # nothing of a card
        raise error
    from wellfed.run.outcome import outcome_of

    outcome = outcome_of(error, has_trained=True, way_on=way_on)
    if not outcome.is_expected:
        raise error
    print(f"{outcome.message}\n{outcome.advice}".rstrip(), file=sys.stderr)
    return outcome.exit_code
