"""Finds and reads the runs that a command names."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wellfed import record
from wellfed.config.files.folder_lookup import RUN, find
from wellfed.config.schema import PathsConfig
from wellfed.errors import ConfigError
from wellfed.record import RunRecord
from wellfed.units import show_text

_TABLES = ("steps.csv", "metrics.csv", "telemetry.csv")


def add_log_dir(parser: argparse.ArgumentParser) -> None:
    """Where names are looked up."""
    parser.add_argument(
        "--log-dir", default=PathsConfig.log_dir, help="where names are looked up: <log dir>/*/runs/ (default: logs)"
    )


def folder_of(asked: str | None, log_dir: Path) -> Path:
    """Returns the run folder that is meant, None = the newest. Raises as `folder_lookup.find` does."""
    return find(asked, log_dir, RUN)


def read(folder: Path) -> RunRecord:
    """The record of a run folder; says which of the files beside it can't be read.

    Raises:
        ConfigError: it can't be read, or is of another schema; says what is wrong with it.
    """
    try:
        found = RunRecord.read(folder)
    except (OSError, ValueError) as error:
        raise ConfigError.of(str(folder), f"can't be read: {problem_of(error)}", "Name another run.") from error
    for name in _TABLES:
        try:
            with (folder / name).open("rb") as stream:
                stream.read(1)
        except (FileNotFoundError, IsADirectoryError):
            pass
        except OSError as error:
            why = f"can't be read ({error.strerror or error}): what it tells is left out."
            print(show_text(f"{folder / name}: {why}"), file=sys.stderr)
    return found


def problem_of(error: OSError | ValueError) -> str:
    """Returns the reason why a record could not be read."""
    return f"{record.FILE_NAME}: {error.strerror or error}." if isinstance(error, OSError) else str(error)
