"""Trains, validates and tests (``wellfed train``, ``python src/train.py``); with ``-m`` many runs."""

from __future__ import annotations

from collections.abc import Sequence

from wellfed.config import entry
from wellfed.run.folder.resume import expand
from wellfed.run.train import on_all_ranks


def main(argv: Sequence[str]) -> int:
    """Composes and checks the configuration before torch is imported, then trains; returns the exit code."""
    return on_all_ranks(lambda job: entry.main("train", job, [*argv], expand=expand))
