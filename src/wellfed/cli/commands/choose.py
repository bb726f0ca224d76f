"""Writes a sweep's best settings as options of loader and memory (``python -m wellfed choose SWEEP --name NAME``)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from wellfed import project
from wellfed.cli.commands.leaderboard import add_sweep
from wellfed.cli.output import Answer
from wellfed.command_line import command
from wellfed.config.entry import config_folders
from wellfed.config.files.folder_lookup import find
from wellfed.config.files.option_file import write_files
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.explain.report.text_table import print_command, print_text
from wellfed.record.entries import RunRecord
from wellfed.study.ranking.ranking import board_of
from wellfed.study.ranking.winner import chosen, score_text, tie_text
from wellfed.study.study_files import SWEEP
from wellfed.study.tune.written_options import exact, free_paths, option_text, other_overrides

_GROUPS = ("loader", "memory")


def main(argv: Sequence[str]) -> int:
    """Writes both files, or none."""
    parser = argparse.ArgumentParser(
        prog=command("choose"),
        description="Write the winner of a sweep as configs/loader/NAME.yaml and configs/memory/NAME.yaml.",
    )
    add_sweep(parser)
    parser.add_argument("--name", required=True, metavar="NAME", help="of the options")
    parser.add_argument("--point", metavar="ID", help="another than the best")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    asked = parser.parse_args(argv)
    folder = find(asked.sweep, Path(asked.log_dir), SWEEP)
    board = board_of(folder)
    flags = board.file.flags
    configs = config_folders(flags)["config_dir"] or project.configs()
    paths = free_paths(asked.name, _GROUPS, configs, flag="--name", may_replace=lambda _: asked.force)
    entry = chosen(board, asked.point)
    way_out = "Choose another with --point, or measure it again: sweep.retry=[ok]."
    try:
        found = asdict(RunRecord.read(folder / entry.row.folder))
    except (OSError, ValueError) as error:
        problem = f"its record can't be read, and the planned numbers are in there: {error}"
        raise ConfigError.of(f"point {entry.point}", problem, way_out) from error
    if (found["status"], found["started_at"]) != ("ok", entry.row.started_at):
        problem = f"its record is of another attempt ({found['status']}, {found['started_at']}) than the measured one."
        raise ConfigError.of(f"point {entry.point}", problem, way_out)
    heading = [
        f"{command('choose')} {shlex.quote(str(folder))} --name {asked.name}",
        f"Record {found['run_id']} of {found['started_at']}: {shlex.join(entry.overrides)}",
        f"{score_text(board, entry)}, on {entry.row.machine}; {entry.row.device}.",
    ]
    texts = {path: option_text(group, found, "\n".join(heading)) for group, path in paths.items()}
    way_out = f"Free space, or make {configs} writable."
    write_files(texts, f"--name {asked.name}", way_out, may_replace=lambda path: asked.force)
    shown = [f"{entry.point}: {score_text(board, entry)}", tie_text(board, entry)]
    shown.append(f"Written: {', '.join(map(str, texts))}")
    searched = [text for text in flags if text.startswith("hydra.searchpath=")]
    options = (f"{group}={asked.name}" for group in _GROUPS)
    settings = exact([*searched, *options, *other_overrides(entry.overrides, _GROUPS)], found, config_folders(flags))
    of_run = [*(text for text in flags if text not in searched), *settings]
    terminal = Answer()
    print_text(terminal, "\n".join(filter(None, shown)))
    print_command(terminal, "Use it:", f"{command('train')} {shlex.join(of_run)}")
    return EXIT_OK
