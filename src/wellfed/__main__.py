"""Runs ``python -m wellfed <command>``."""

from __future__ import annotations

import sys

from wellfed.errors import in_environment

if __name__ == "__main__":
    with in_environment():
        from wellfed.commands.cli import main

        sys.exit(main(sys.argv[1:]))
