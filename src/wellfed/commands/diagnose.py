"""Says again where a run lost its time, from its files alone (``python -m wellfed diagnose RUN``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from wellfed.commands.which_run import add_log_dir, folder_of, read, state_lines
from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.judge import judge
from wellfed.errors import EXIT_OK
from wellfed.report import run_lines
from wellfed.run.screen import Terminal


def main(argv: Sequence[str]) -> int:
    """Prints what was found; the run folder is left as it is."""
    parser = argparse.ArgumentParser(
        prog="python -m wellfed diagnose",
        description="Where a run lost its time, with evidence and overrides, from its files; also of one that was "
        "killed, or runs now.",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="its folder, or its name (default: the newest)")
    add_log_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked = parser.parse_args(argv)
    folder = folder_of(asked.run, Path(asked.log_dir))
    evidence = Evidence.of(read(folder), folder)
    found, terminal = evidence.record, Terminal()
    found.findings = [finding.entry() for finding in judge(evidence)]
    if asked.json:
        terminal.show_json({"run_id": found.run_id, "status": found.status, "findings": found.findings})
        return EXIT_OK
    head = [f"{folder}: {found.status}, {found.steps} steps", *state_lines(found)]
    for line in [*head, *run_lines.finding_lines(found), *run_lines.time_lines(found), *run_lines.gpu_lines(found)]:
        terminal.print(line, soft_wrap=True)
    return EXIT_OK
