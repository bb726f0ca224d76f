"""Runs ``wellfed <command>`` and ``python -m wellfed <command>``."""

from __future__ import annotations

import sys


def run() -> int:
    """Runs the command line of this process and returns the exit code."""
    from wellfed.cli.main import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    if not __package__:  # when started by path, as other ranks may be, Python puts this folder on sys.path
        del sys.path[0]
    sys.exit(run())
