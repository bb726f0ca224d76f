"""Reports where a run lost its time (``python -m wellfed diagnose RUN``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from wellfed.cli.output import Answer
from wellfed.cli.which_run import add_log_dir, evidence_of
from wellfed.command_line import command
from wellfed.errors import EXIT_OK
from wellfed.explain.report.run_lines import sections
from wellfed.explain.report.text_table import print_text
from wellfed.record.folder_lookup import RUN, find


def main(argv: Sequence[str]) -> int:
    """Prints the findings; the run folder is not modified."""
    parser = argparse.ArgumentParser(
        prog=command("diagnose"),
        description="Where a run lost its time, with evidence and overrides, from its files; also of one that was "
        "killed, or runs now.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run by its folder, its name or a beginning of it (default: the newest)",
    )
    add_log_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked = parser.parse_args(argv)
    folder = find(asked.run, Path(asked.log_dir), RUN)
    found, terminal = evidence_of(folder).record, Answer()
    if asked.json:
        terminal.show_json({"run_id": found.run_id, "status": found.status, "findings": found.findings})
        return EXIT_OK
    print_text(terminal, str(folder))
    shown = [section for section in sections(found) if section.name in ("verdict", "findings", "utilisation", "time")]
    for line in (line for section in shown for line in section.lines):
        print_text(terminal, line)
    return EXIT_OK
