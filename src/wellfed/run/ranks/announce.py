"""Tells who sits before a terminal what takes so long."""

from __future__ import annotations

import sys


def announce(what: str) -> None:
    """Prints what is being done if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
