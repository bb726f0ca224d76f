"""Prints the error that ended a command without a record, and chooses the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from wellfed.errors import (
    EXIT_FAILED,
    EXIT_NOTHING_RUN,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    ConfigError,
    NotShown,
    WellfedError,
    is_the_users,
    shortened,
)
from wellfed.units import show_text

_OF_MEMORY, _OF_INPUT = ("device_oom", "host_oom"), ("config", "data")
"""Kinds of error with an exit code of their own."""


def report_error(error: Exception, way_on: str = "", heading: str = "") -> int:
    """Prints an error as its user needs it, and returns the exit code.

    Args:
        way_on: what to type if the GPU was lost or is too small.
        heading: for faults outside a configuration.

    Raises:
        Exception: ``error`` itself, if its traceback has no frame of the user's.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if isinstance(error, BrokenPipeError):  # of a print
        return _not_shown(error)
    if isinstance(error, WellfedError):
        more = way_on if error.kind == "device_oom" else ""
        shown = error.under(heading) if heading and isinstance(error, ConfigError) else error
        print(show_text(f"{shown}\n{more}".rstrip()), file=sys.stderr)
        own = EXIT_OUT_OF_MEMORY if error.kind in _OF_MEMORY else EXIT_NOTHING_RUN
        return error.exit_code or (own if error.kind in (*_OF_MEMORY, *_OF_INPUT) else EXIT_FAILED)
    if "torch" not in sys.modules:  # no GPU was used
        return _show(error)
    from wellfed.run.outcome import outcome_of

    outcome = outcome_of(error, has_trained=True)
    if not outcome.is_expected:
        return _show(error)
    advice = outcome.advice
    if way_on and outcome.kind in ("device_oom", "code"):
        advice = way_on if outcome.kind == "device_oom" else f"{advice} {way_on}"
    print(show_text(f"{outcome.message}\n{advice}".rstrip()), file=sys.stderr)
    return outcome.exit_code


def verdict_code(compare: Callable[[], int]) -> int:
    """Returns the exit code of a comparison. Every error, raised or not, is exit code 2: 1 is a run that is slower."""
    try:
        code = compare()
        return code if all_shown(code) == code else EXIT_NOTHING_RUN
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  also a fault of the engine is no verdict
        try:
            report_error(error)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        return EXIT_NOTHING_RUN


def all_shown(code: int) -> int:
    """Returns ``code``, or another exit code if what the command printed can't be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _not_shown(error, code)
    return code


def _not_shown(error: OSError, code: int = EXIT_OK) -> int:
    """Reports that output can't be written, unless a reader closed the pipe (``| head``)."""
    with suppress(OSError, ValueError):  # buffered output must not fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code if isinstance(error, BrokenPipeError) else code or report_error(NotShown(error))


def _show(error: Exception) -> int:
    """Prints the user's own frames. An error without any is a fault of the engine and is raised again."""
    if not any(is_the_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        raise error
    print(shortened(error, "HYDRA_FULL_ERROR=1 shows all"), end="", file=sys.stderr)
    return EXIT_FAILED
