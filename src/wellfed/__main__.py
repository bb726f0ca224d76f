"""Runs ``python -m wellfed <command>``."""

from __future__ import annotations

import sys

from wellfed.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
