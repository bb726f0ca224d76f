"""Tells what has ended a command that leaves no record: the message alone, and the exit code."""

from __future__ import annotations

import os
import sys
import traceback

from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OUT_OF_MEMORY, WellfedError, is_the_users, shortened
from wellfed.units import show_text

_BY_KIND = {"config": EXIT_NOTHING_RUN, "data": EXIT_NOTHING_RUN, "device_oom": EXIT_OUT_OF_MEMORY}
"""Exit codes."""


def tell(error: Exception, way_on: str = "") -> int:
    """Print what a user needs to know of an error; the exit code.

    Args:
        way_on: what can be typed where the card is the matter: lost, or too small.

    Raises:
        Exception: ``error`` itself, where a traceback helps and none of its frames is the user's own.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if isinstance(error, WellfedError):
        more = way_on if error.kind == "device_oom" else ""
        print(show_text(f"{error}\n{more}".rstrip()), file=sys.stderr)
        return _BY_KIND.get(error.kind, EXIT_FAILED)
    if "torch" not in sys.modules:  # nothing of a card
        return _show(error)
    from wellfed.run.outcome import outcome_of

    outcome = outcome_of(error, has_trained=True, way_on=way_on)
    if not outcome.is_expected:
        return _show(error)
    print(show_text(f"{outcome.message}\n{outcome.advice}".rstrip()), file=sys.stderr)
    return outcome.exit_code


def _show(error: Exception) -> int:
    """The user's own frames; a traceback without any is a bug of ours."""
    if not any(is_the_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        raise error
    print(shortened(error, "HYDRA_FULL_ERROR=1 shows all"), end="", file=sys.stderr)
    return EXIT_FAILED
