"""Finds and reads the runs that a command names."""

from __future__ import annotations

import argparse
from pathlib import Path

from wellfed.config.schema import PathsConfig
from wellfed.errors import ConfigError
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.record.entries import FILE_NAME, RunRecord


def add_log_dir(parser: argparse.ArgumentParser, kind: str = "runs") -> None:
    """Adds the flag that sets the folder for names."""
    help_text = f"where names are looked up: <log dir>/*/{kind}/ (default: logs)"
    parser.add_argument("--log-dir", default=PathsConfig.log_dir, help=help_text)


def evidence_of(folder: Path) -> Evidence:
    """Returns the evidence of a run folder with its findings; raises a ConfigError for a damaged record."""
    try:
        evidence = Evidence.of(RunRecord.read(folder), folder)
        conclude(evidence)
    except (OSError, TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
        why = f"{FILE_NAME}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise ConfigError.of(str(folder), f"can't be read: {why.rstrip('.')}.", "Name another run.") from error
    return evidence
