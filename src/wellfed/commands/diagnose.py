"""Says again where a run lost its time, from its files alone (``python -m wellfed diagnose RUN``)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from wellfed import record
from wellfed.config.schema import PathsConfig
from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.judge import conclude
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.folder_lookup import FolderKind, find
from wellfed.record import RunRecord
from wellfed.report.run_sections import sections
from wellfed.run.screen import Terminal

_RUN = FolderKind("run", record.FILE_NAME, "python src/train.py", newest_first=True)


def main(argv: Sequence[str]) -> int:
    """Prints what was found; the run folder is left as it is."""
    parser = argparse.ArgumentParser(
        prog="python -m wellfed diagnose",
        description="Where a run lost its time, with evidence and overrides, from its files; also of one that was "
        "killed, or runs now.",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="its folder, or its name (default: the newest)")
    parser.add_argument(
        "--log-dir", default=PathsConfig.log_dir, help="where names are looked up: <log dir>/*/runs/ (default: logs)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked = parser.parse_args(argv)
    folder = _folder(asked.run, Path(asked.log_dir))
    try:
        evidence = Evidence.of(RunRecord.read(folder), folder)
    except (OSError, ValueError) as error:
        raise ConfigError.of(str(folder), f"can't be read: {error}", "Name the folder of another run.") from error
    conclude(evidence)
    found = evidence.record
    terminal = Terminal(markup=False, highlight=False, emoji=False)
    if asked.json:
        about = {"run_id": found.run_id, "status": found.status, "findings": found.findings}
        terminal.print(json.dumps(record.plain(about), indent=2), soft_wrap=True)
        return EXIT_OK
    terminal.print(f"{folder}: {found.status}, {found.steps} steps", soft_wrap=True)
    for section in sections(found):
        if section.name in ("verdict", "findings", "utilisation", "time"):
            for line in section.lines:
                terminal.print(line, soft_wrap=True)
    return EXIT_OK


def _folder(asked: str | None, log_dir: Path) -> Path:
    newest = _RUN.all(log_dir)
    return newest[0] if asked is None and newest else find(asked or "", log_dir, _RUN)
