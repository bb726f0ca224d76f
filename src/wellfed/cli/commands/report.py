"""Rewrites the reports of a run from its files, or compares runs (``python -m wellfed report``)."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from wellfed.cli.exit_code import verdict_code
from wellfed.cli.output import Answer
from wellfed.cli.which_run import add_log_dir, evidence_of
from wellfed.command_line import command
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OK, ConfigError, Fault
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.run_lines import headline, state_lines
from wellfed.explain.report.slowdown import Slowdown, disturbances, reasons_against
from wellfed.explain.report.text_table import TextTable, console_width, print_text
from wellfed.explain.report.write import MARKDOWN, PAGE, write_comparison, write_reports
from wellfed.record.folder_lookup import RUN, find
from wellfed.units import show_text


def main(argv: Sequence[str]) -> int:
    """Writes the pages and prints their paths; no record is changed.

    With ``--max-slower``: returns 1 if the second is slower than the first by more than that, 2 without a verdict.
    """
    asked = _parser().parse_args(argv)
    return _report(asked) if asked.max_slower is None else verdict_code(lambda: _report(asked))


def _parser() -> argparse.ArgumentParser:
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
    slower = "exit code 1 if the second run is slower than the first by more than this, beyond noise: 5%%"
    add_max_slower(parser, slower)
    add_log_dir(parser)
    return parser


def _report(asked: argparse.Namespace) -> int:
    log_dir, out = Path(asked.log_dir), None if asked.out is None else Path(asked.out)
    if len(asked.runs) > 2:
        problem = f"are {len(asked.runs)} runs, and a page shows two."
        raise ConfigError.of(" ".join(asked.runs), problem, f"Name two. All in a table: {command('runs')}")
    if asked.max_slower is not None and len(asked.runs) < 2:
        problem, way_out = "compares runs, and one is named at most.", "Name the reference first: report A B."
        raise ConfigError.of("--max-slower", problem, way_out)
    if out is not None and out.suffix in (".html", ".md"):
        raise ConfigError.of(f"--out {out}", "is the name of a file; the pages have theirs.", "Name a folder.")
    folders = [find(name, log_dir, RUN) for name in asked.runs or [None]]
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise ConfigError.of(asked.runs[1], "is the same run.", "Name another one to compare it with.")
    found = [evidence_of(folder) for folder in folders]
    terminal = Answer(width=console_width())
    if len(found) > 1:
        both = Comparison(*found)
        with _in_folder(out or (log_dir if log_dir.is_dir() else Path())) as place:
            written = [write_comparison(both, place, [folder.name for folder in resolved])]
        for part in _side_by_side(both):
            print_text(terminal, part) if isinstance(part, str) else terminal.print(part)
    else:
        with _in_folder(out or folders[0]) as place:
            write_reports(found[0], place)
        written = [place / MARKDOWN, place / PAGE]
        record = found[0].record
        print_text(terminal, "\n".join([headline(record), *state_lines(record)]))
    print_text(terminal, f"Written: {', '.join(map(str, written))}")
    return EXIT_OK if asked.max_slower is None else _guarded(terminal, both, asked.max_slower)


def no_verdict(faults: Iterable[Fault]) -> int:
    """Prints every reason why runs can't be compared, and returns the exit code."""
    heading = "No verdict: these runs can't be compared."
    print(show_text(ConfigError(list(dict.fromkeys(faults))).under(heading)), file=sys.stderr)
    return EXIT_NOTHING_RUN


def add_max_slower(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Adds the flag with the limit of a slowdown, as a fraction."""
    parser.add_argument("--max-slower", type=_fraction, metavar="PERCENT", help=help_text)


def _fraction(text: str) -> float:
    number = text.strip().removesuffix("%")
    with suppress(ValueError):
        if number != text.strip() and 0 <= (percent := float(number)) < math.inf:
            return percent / 100
    raise argparse.ArgumentTypeError(f"{text}: must be a percentage from 0% on, with its sign: 5%")


def _guarded(terminal: Answer, both: Comparison, limit_frac: float) -> int:
    """Prints whether B is slower than A by more than the limit; returns the exit code."""
    print_text(terminal, "The intervals do not include noise between runs.")
    faults = [*reasons_against(both), *disturbances(both)]
    if faults or both.rate is None:
        return no_verdict(faults)
    found = Slowdown(both.rate.inverse, limit_frac)
    print_text(terminal, found.verdict)
    return EXIT_FAILED if found.is_beyond_limit else EXIT_OK


@contextmanager
def _in_folder(folder: Path) -> Iterator[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        problem = f"can't be written to: {error.strerror or error}."
        raise ConfigError.of(str(folder), problem, "Make room there, or write elsewhere: --out FOLDER.") from error


def _side_by_side(both: Comparison) -> Iterator[str | TextTable]:
    """Yields the page in short."""
    runs = dict(zip("AB", both.records, strict=True))
    for letter, record in runs.items():
        yield f"{letter}: {record.run_id} ({record.workload}): {headline(record)}"
    yield from (both.verdict, *both.caveats, "")
    rows = [*both.figures, *both.metrics]
    yield _table(("", "A", "B", "B to A"), [(row.name, *row.shown, str(row.ratio or "")) for row in rows])
    yield from differing_table(both)
    yield ""
    for letter, record in runs.items():
        yield f"{letter}: {', '.join(finding['id'] for finding in record.findings)}"


def differing_table(both: Comparison) -> Iterator[str | TextTable]:
    """Yields an empty line and a table of settings that differ; nothing if none does."""
    if both.settings:
        yield ""
        yield _table(("differs", "A", "B"), [(row.name, *row.shown) for row in both.settings])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> TextTable:
    table = TextTable(*heads)
    for row in rows:
        table.add_row(*row)
    return table
