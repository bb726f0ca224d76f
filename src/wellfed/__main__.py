"""Runs ``wellfed <command>`` and ``python -m wellfed <command>``."""

from __future__ import annotations

import sys


def run() -> int:
    """Runs the command line of this process and returns the exit code."""
    from wellfed.cli.main import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    if not __package__:  # started by its path, as other ranks may be: the files beside it are no modules of their own
        del sys.path[0]
    sys.exit(run())
