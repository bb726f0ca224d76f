"""Lists the newest runs with their outcomes (``python -m wellfed runs``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from wellfed.cli.output import Answer
from wellfed.cli.which_run import add_log_dir
from wellfed.command_line import command
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.explain.report.run_digest import RunDigest, digest, runs_table
from wellfed.explain.report.text_table import print_text
from wellfed.record.entries import RunRecord
from wellfed.record.folder_lookup import RUN

_SHOWN = 20


def main(argv: Sequence[str]) -> int:
    """Prints a row per run, the newest first. The row of an unreadable record shows the reason."""
    parser = argparse.ArgumentParser(
        prog=command("runs"),
        description="The newest runs: outcome, verdict, rate, share of the ceiling, a metric, "
        f"and what was typed. Trials of sweeps: {command('leaderboard')}.",
    )
    parser.add_argument("--workload", metavar="W", help="only runs of this one")
    parser.add_argument("-n", "--last", type=int, default=_SHOWN, metavar="N", help=f"how many (default: {_SHOWN})")
    add_log_dir(parser)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    asked = parser.parse_args(argv)
    if asked.last < 1:
        raise ConfigError.of(f"--last {asked.last}", "is no number of runs.", f"Write --last {_SHOWN}.")
    log_dir, terminal = Path(asked.log_dir), Answer()
    known = RUN.all(log_dir)
    folders = _folders(known, log_dir, asked.workload)
    found = [_digest(folder) for folder in folders[: asked.last]]
    if asked.json:
        terminal.show_json([one.data for one in found])
        return EXIT_OK
    for line in runs_table(found).lines(terminal.columns):
        terminal.print(line, soft_wrap=True)
    if len(found) < len(folders):
        print_text(terminal, f"{len(found)} of {len(folders)} runs; all: --last {len(folders)}")
    return EXIT_OK


def _folders(known: Sequence[Path], log_dir: Path, workload: str | None) -> list[Path]:
    if not known:
        way_out = f"{RUN.first_command} makes one. Runs elsewhere: --log-dir. Sweeps: {command('leaderboard')}."
        raise ConfigError.of(str(log_dir), "there is no run in it yet.", way_out)
    kept = [folder for folder in known if workload in (None, folder.parent.parent.name)]
    if not kept:
        there = ", ".join(sorted({folder.parent.parent.name for folder in known}))
        raise ConfigError.of(f"--workload {workload}", f"has no run in {log_dir}.", f"There are runs of: {there}.")
    return kept


def _digest(folder: Path) -> RunDigest:
    try:
        return digest(folder, RunRecord.read(folder))
    except (OSError, ValueError, ArithmeticError, TypeError, LookupError) as error:  # one run must not hide the others
        return digest(folder, error)
