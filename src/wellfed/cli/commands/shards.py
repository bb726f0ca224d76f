"""Packs a folder of recordings by class into tar shards (``python -m wellfed shards``)."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from wellfed.cli.output import Answer
from wellfed.command_line import command
from wellfed.config.quoting import assigned
from wellfed.data.shards.write_shards import USUAL_NUM, Written, write_shards
from wellfed.errors import EXIT_OK
from wellfed.explain.report.text_table import print_command, print_text
from wellfed.units import counted, show_bytes, show_count


def main(argv: Sequence[str]) -> int:
    """Prints what was packed and what was skipped."""
    parser = argparse.ArgumentParser(
        prog=command("shards"),
        description="Pack many small files into a few tar files, in webdataset's layout. SRC/<class>/**/*.wav become "
        "DIR/0000.tar and on, each file with the number of its class beside it (.cls). The names of the classes are in "
        "DIR/classes.json. SRC/train, SRC/val and SRC/test become DIR/train, DIR/val and DIR/test. Files on a network "
        "drive or a spinning disk are read several times as fast then.",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the folder that holds a folder for each class")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder for the shards")
    parser.add_argument("--num", metavar="N", type=int, help=f"number of shards, of each split (default: {USUAL_NUM})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the order in which files are packed")
    asked = parser.parse_args(argv)
    terminal = Answer()
    source, out = asked.source.expanduser(), asked.out.expanduser()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("packing")

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        written = write_shards(source, out, num=asked.num, seed=asked.seed, on_file=show)
    print_text(terminal, f"{_summary(written)}: {asked.out}")
    where = assigned("workload.data.path", str(asked.out))
    print_command(terminal, "To train on them:", f"{command('train')} workload=... {shlex.quote(where)}")
    return EXIT_OK


def _summary(written: Written) -> str:
    classes = "1 class" if len(written.classes) == 1 else f"{show_count(len(written.classes))} classes"
    files = f"{counted(written.num_samples, 'file')} of {classes} ({show_bytes(written.num_bytes)})"
    return f"{files} in {counted(len(written.shards), 'shard')}"
