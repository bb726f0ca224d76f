"""Writes the winner of a sweep as options of loader and memory (``python -m wellfed choose SWEEP --name NAME``)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wellfed import record
from wellfed.commands.answer import Answer
from wellfed.commands.leaderboard import add_sweep
from wellfed.config.hydra_session import default_config_dir
from wellfed.config.option_file import Value, check_name, comment_lines, write_files, yaml_lines
from wellfed.config.schema import LoaderConfig, MemoryConfig
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.sweep import folders
from wellfed.sweep.ranking import Entry, Leaderboard, leaderboard
from wellfed.sweep.winner import chosen, in_words, overrides_of_other_groups, recorded_knobs, tie_in_words

_SCHEMAS: Mapping[str, type] = {"loader": LoaderConfig, "memory": MemoryConfig}
_OF_THE_DATA = ("skip_ids", "max_skipped", "shuffle_buffer")
"""Which samples are bad, and in which order they come, is no matter of speed."""
_SHIPPED = {
    "loader": ("auto", "baseline", "conservative", "balanced", "aggressive", "own"),
    "memory": ("auto", "cache", "cache_host", "dynamic", "accumulate", "tight"),
}


def main(argv: Sequence[str]) -> int:
    """Writes both files, or none."""
    parser = argparse.ArgumentParser(
        prog="python -m wellfed choose",
        description="Write the winner of a sweep as configs/loader/NAME.yaml and configs/memory/NAME.yaml.",
    )
    add_sweep(parser)
    parser.add_argument("--name", required=True, metavar="NAME", help="of the options")
    parser.add_argument("--point", metavar="ID", help="another than the best")
    parser.add_argument("--force", action="store_true", help="replace files of that name")
    asked = parser.parse_args(argv)
    paths = _free_paths(asked.name, replaces=asked.force)
    folder = folders.find(asked.sweep, Path(asked.log_dir))
    board = leaderboard(*folders.load(folder))
    entry = chosen(board, asked.point)
    try:
        found = record.read(folder / entry.folder)
    except (OSError, ValueError) as error:
        problem = f"its record can't be read, and the planned numbers are in there: {error}"
        way_out = "Choose another with --point, or measure it again: sweep.retry=[ok]."
        raise ConfigError.of(f"point {entry.point}", problem, way_out) from error
    texts = {paths[group]: _text(group, asked.name, board, entry, found, folder) for group in paths}
    write_files(texts, f"--name {asked.name}", "Free space, or make configs/ writable.")
    said = [f"{entry.point}: {in_words(board, entry)}", tie_in_words(board, entry)]
    said.append(f"Written: {', '.join(map(str, texts))}")
    options = [f"{group}={asked.name}" for group in _SCHEMAS]
    words = [*board.sweep.flags, *options, *overrides_of_other_groups(entry, list(_SCHEMAS))]
    said.append(f"Use it: python src/train.py {shlex.join(words)}")
    Answer().print("\n".join(filter(None, said)), soft_wrap=True)
    return EXIT_OK


def _free_paths(name: str, *, replaces: bool) -> dict[str, Path]:
    check_name(name, "--name")
    paths = {group: default_config_dir() / group / f"{name}.yaml" for group in _SCHEMAS}
    shipped = [group for group, options in _SHIPPED.items() if name in options]
    if shipped:
        problem = f"is an option of {' and '.join(shipped)} that others rely on; it is not replaced."
        raise ConfigError.of(f"--name {name}", problem, f"Write --name my_{name}.")
    there = [str(path) for path in paths.values() if path.exists()]
    if there and not replaces:
        problem = f"{' and '.join(there)}: there already."
        raise ConfigError.of(f"--name {name}", problem, "Add --force, or take another name.")
    return paths


def _text(group: str, name: str, board: Leaderboard, entry: Entry, found: Mapping[str, Any], folder: Path) -> str:
    knobs = [field.name for field in fields(_SCHEMAS[group]) if field.name not in _OF_THE_DATA]
    known = recorded_knobs(found, group, knobs)
    values = {knob: Value(value, because) for knob, (value, because) in known.items()}
    if group == "memory":
        values["accumulate"] = Value(None, "follows from micro_batch")
    heading = "\n".join(
        [
            f"python -m wellfed choose {shlex.quote(str(folder))} --name {name}",
            f"Record {found['run_id']} of {found['started_at']}: {shlex.join(entry.overrides)}",
            f"{in_words(board, entry)}, on {board.sweep.machine or entry.device}.",
        ]
    )
    return "\n".join([*comment_lines(heading), *yaml_lines(values)]) + "\n"
