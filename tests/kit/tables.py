"""Reads the tables that a run leaves."""

import csv
from pathlib import Path


def rows_of(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a csv file by its header."""
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
