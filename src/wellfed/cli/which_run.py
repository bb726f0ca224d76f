"""Finds and reads the runs that a command names."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wellfed.config.schema import PathsConfig
from wellfed.errors import ConfigError
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.record import FILE_NAME, RunRecord, regular
from wellfed.units import show_text

_TABLES = ("steps.csv", "metrics.csv", "telemetry.csv")


def add_log_dir(parser: argparse.ArgumentParser, kind: str = "runs") -> None:
    """Adds the flag that sets the folder for names."""
    help_text = f"where names are looked up: <log dir>/*/{kind}/ (default: logs)"
    parser.add_argument("--log-dir", default=PathsConfig.log_dir, help=help_text)


def evidence_of(folder: Path) -> Evidence:
    """Returns the evidence of a run folder with its findings; raises as `read` does."""
    evidence = Evidence.of(read(folder), folder)
    conclude(evidence)
    return evidence


def read(folder: Path) -> RunRecord:
    """Returns the record of a run folder, else raises a ConfigError; warns about other unreadable files."""
    try:
        found = RunRecord.read(folder)
    except (OSError, ValueError) as error:
        why = f"{FILE_NAME}: {error.strerror or error}." if isinstance(error, OSError) else error
        raise ConfigError.of(str(folder), f"can't be read: {why}", "Name another run.") from error
    for name in _TABLES:
        try:
            with regular(folder / name).open("rb") as stream:
                stream.read(1)
        except (FileNotFoundError, IsADirectoryError):
            pass
        except OSError as error:
            why = f"can't be read ({error.strerror or error}): its figures are left out."
            print(show_text(f"{folder / name}: {why}"), file=sys.stderr)
    return found
