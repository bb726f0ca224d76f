"""Rewrites the reports of a run from its files, or compares two runs (``python -m wellfed report``)."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from wellfed.cli.output import Answer
from wellfed.cli.which_run import add_log_dir, evidence_of
from wellfed.command_line import command
from wellfed.config.files.folder_lookup import RUN, find
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.run_lines import headline, state_lines
from wellfed.explain.report.write import MARKDOWN, PAGE, write_comparison, write_reports
from wellfed.study.board.terminal import width


def main(argv: Sequence[str]) -> int:
    """Writes the pages and prints their paths; no record is changed."""
    parser = argparse.ArgumentParser(
        prog=command("report"),
        description="Write report.html and report.md of a run again, from its files alone: also of one that was "
        "killed, or runs now. Of two runs: a page of both side by side.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="its folder, its name or the beginning of it (default: the newest); two are compared",
    )
    parser.add_argument("--out", metavar="FOLDER", help="where to write (default: the run folder; of two: the log dir)")
    add_log_dir(parser)
    asked = parser.parse_args(argv)
    log_dir, out = Path(asked.log_dir), None if asked.out is None else Path(asked.out)
    if len(asked.runs) > 2:
        problem = f"are {len(asked.runs)} runs, and a page shows one, or two side by side."
        raise ConfigError.of(" ".join(asked.runs), problem, f"Name at most two. All in a table: {command('runs')}")
    if out is not None and out.suffix in (".html", ".md"):
        raise ConfigError.of(f"--out {out}", "is the name of a file; the pages have theirs.", "Name a folder.")
    folders = [find(name, log_dir, RUN) for name in asked.runs or [None]]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError.of(asked.runs[1], "is the same run.", "Name another one to compare it with.")
    found = [evidence_of(folder) for folder in folders]
    terminal = Answer(width=width())
    if len(found) == 2:
        both = Comparison(*found)
        with _in_folder(out or (log_dir if log_dir.is_dir() else Path())) as place:
            written = [write_comparison(both, place, [folder.resolve().name for folder in folders])]
        for part in _side_by_side(both):
            terminal.print(part, soft_wrap=isinstance(part, str))
    else:
        with _in_folder(out or folders[0]) as place:
            write_reports(found[0], place)
        written = [place / MARKDOWN, place / PAGE]
        record = found[0].record
        terminal.print("\n".join([headline(record), *state_lines(record)]), soft_wrap=True)
    terminal.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
    return EXIT_OK


@contextmanager
def _in_folder(folder: Path) -> Iterator[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        problem = f"can't be written to: {error.strerror or error}."
        room = "Make room there, or write" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Write"
        raise ConfigError.of(str(folder), problem, f"{room} elsewhere: --out FOLDER.") from error


def _side_by_side(both: Comparison) -> Iterator[str | Table]:
    for letter, record in zip("AB", both.records, strict=True):
        yield f"{letter}: {record.run_id} ({record.workload}): {headline(record)}"
    yield both.verdict
    yield from both.caveats
    figures = [(one.name, *one.shown, "" if one.ratio is None else str(one.ratio)) for one in both.figures]
    figures += [(one.name, *one.shown, "") for one in both.metrics]
    yield ""
    yield _table(("", "A", "B", "B to A"), figures)
    planned = {one.knob: [f"{one.knob} (plan)", *one.values] for one in both.plan}
    settings = {name: [name, a, b] for name, a, b in both.settings} | planned
    if settings:
        yield ""
        yield _table(("differs", "A", "B"), list(settings.values()))
    yield ""
    for letter, findings in zip("AB", both.findings, strict=True):
        yield f"{letter}: {', '.join(finding['id'] for finding in findings)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
