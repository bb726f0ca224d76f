"""Reports where a run lost its time, or what a CSV of GPU curves shows (``python -m wellfed diagnose RUN``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from wellfed import record
from wellfed.cli.output import Answer
from wellfed.cli.which_run import add_log_dir, evidence_of
from wellfed.command_line import command
from wellfed.config.files.folder_lookup import RUN, find
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.explain.diagnosis.curves.curve_verdict import curve_entry, curve_lines
from wellfed.explain.diagnosis.curves.recorded_curves import read_curves
from wellfed.explain.report.run_lines import sections
from wellfed.explain.report.text_table import print_command, print_text


def main(argv: Sequence[str]) -> int:
    """Prints the findings; the run folder is not modified."""
    parser = argparse.ArgumentParser(
        prog=command("diagnose"),
        description="Where a run lost its time, with evidence and overrides, from its files; also of one that was "
        "killed, or runs now. Of a CSV of GPU curves (nvidia-smi's, the monitor's): how busy each GPU was, and whether "
        "it swings.",
    )
    parser.add_argument(
        "run",
        metavar="RUN|FILE.csv",
        nargs="?",
        help="a run by its folder, its name or a beginning of it (default: the newest), or a CSV",
    )
    add_log_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked = parser.parse_args(argv)
    run = asked.run or ""
    if os.path.isfile(run) or (run.lower().endswith(".csv") and not os.path.isdir(run)):
        return _curves(Path(run), as_json=asked.json)
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


def _curves(path: Path, *, as_json: bool) -> int:
    folder = path.absolute().parent
    is_of_run = path.is_file() and (folder / record.FILE_NAME).is_file()
    if is_of_run and path.name != "telemetry.csv":
        problem = f"is a file of the run {folder.name}."
        raise ConfigError.of(str(path), problem, f"Its folder is diagnosed: {command('diagnose')} {folder}")
    file = read_curves(path)
    terminal = Answer()
    if as_json:
        terminal.show_json({"file": str(path), **curve_entry(file)})
        return EXIT_OK
    for line in curve_lines(file):
        print_text(terminal, line)
    if is_of_run:
        print_command(terminal, "The folder of its run has more:", f"{command('diagnose')} {folder}")
    return EXIT_OK
