"""Writes a sweep's best settings as an experiment (``python -m wellfed choose SWEEP --name NAME``)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from wellfed.cli.commands.leaderboard import add_sweep
from wellfed.cli.output import Answer
from wellfed.command_line import command
from wellfed.config.files.experiment_file import free_path
from wellfed.errors import EXIT_OK
from wellfed.explain.report.text_table import print_command, print_text
from wellfed.record.entries import RunRecord
from wellfed.record.folder_lookup import find
from wellfed.study.ranking.ranking import board_of, chosen, score_text, tie_text
from wellfed.study.study_files import SWEEP
from wellfed.study.tune.written_experiment import write_winner


def main(argv: Sequence[str]) -> int:
    """Writes the file, and prints the command that uses it."""
    parser = argparse.ArgumentParser(
        prog=command("choose"),
        description="Write the winner of a sweep as configs/experiment/NAME.yaml.",
    )
    add_sweep(parser)
    parser.add_argument("--name", required=True, metavar="NAME", help="of the experiment")
    parser.add_argument("--point", metavar="ID", help="another than the best")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    asked = parser.parse_args(argv)
    folder = find(asked.sweep, Path(asked.log_dir), SWEEP)
    board = board_of(folder)
    flags = board.file.flags
    free_path(asked.name, flag="--name", replaces=asked.force, flags=flags)
    entry = chosen(board, asked.point)
    found = RunRecord.read(folder / entry.row.folder)
    heading = [
        f"{command('choose')} {shlex.quote(str(folder))} --name {asked.name}",
        f"Record {found.run_id} of {found.started_at}: {shlex.join(entry.overrides)}",
        f"{score_text(board, entry)}, on {entry.row.machine}; {entry.row.device}.",
    ]
    path, use = write_winner(
        *(asked.name, entry.overrides, found, flags),
        flag="--name",
        heading="\n".join(heading),
        replaces=asked.force,
    )
    shown = [f"{entry.point}: {score_text(board, entry)}", tie_text(board, entry), f"Written: {path}"]
    terminal = Answer()
    print_text(terminal, "\n".join(filter(None, shown)))
    print_command(terminal, "Use it:", f"{command('train')} {shlex.join(use)}")
    return EXIT_OK
