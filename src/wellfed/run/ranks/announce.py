"""Tells who sits before a terminal what takes so long."""

from __future__ import annotations

import sys


def announce(what: str) -> None:
    """What is being done, for who sits before a terminal: nobody else reads it."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
