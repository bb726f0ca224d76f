"""Trains a configuration in turns against another commit (``python -m wellfed bench``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wellfed.cli.commands.report import add_max_slower, differing_table, no_verdict
from wellfed.cli.exit_code import verdict_code
from wellfed.cli.output import Answer
from wellfed.command_line import command
from wellfed.config.compose import Composed, compose
from wellfed.config.quoting import is_null, key_value, quoted, unquoted
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError
from wellfed.explain.report.slowdown import Slowdown
from wellfed.explain.report.text_table import TextTable, console_width, print_text
from wellfed.process import Stopped, StopRequest, exit_code_of
from wellfed.run.folder import run_folder
from wellfed.study.bench import RESULT, ROUNDS, Bench, BenchRound, two_sides
from wellfed.units import counted, show_count, show_factor


def main(argv: Sequence[str]) -> int:
    """Prints the ratio of each round and writes it; returns 1 if B is slower than the limit, 2 without a verdict."""
    asked = _parser().parse_intermixed_args(argv)
    return verdict_code(lambda: _bench(asked))


def _bench(asked: argparse.Namespace) -> int:
    if asked.rounds < 1:
        problem, way_out = "is no number of rounds.", f"Write --rounds {ROUNDS}."
        raise ConfigError.of(f"--rounds {asked.rounds}", problem, way_out)
    typed = [quoted(text) for text in asked.overrides]
    _check(typed)
    composed: Composed[RunConfig] = compose(typed)
    benches = Path(composed.config.paths.log_dir) / composed.config.workload.name / "benches"
    terminal, stop = Answer(width=console_width()), StopRequest()
    unit = composed.config.workload.sample_unit
    bench: Bench | None = None

    def ended(number: int, found: BenchRound) -> None:
        a, b = map(show_count, found.rates)
        ratio = f"B takes {show_factor(found.time_ratio)} times as long"
        print_text(terminal, f"Round {number} of {asked.rounds}: A {a} {unit}/s, B {b} {unit}/s; {ratio}.")

    with stop.listening(), suppress(Stopped), two_sides(asked.against) as sides:
        try:
            folder = run_folder.new_in(benches)
        except OSError as error:
            problem = f"{benches} can't be written to: {error.strerror or error}."
            raise ConfigError.of("paths.log_dir", problem, "Name another folder: paths.log_dir=<folder>.") from error
        bench = Bench(sides, typed, asked.rounds, folder, ended)
        for side in sides:
            commit = f" at {side.commit[:10]}" if side.commit and side.commit[:10] not in side.title else ""
            changed = ", with uncommitted changes" if side.is_changed else ""
            print_text(terminal, f"{side.letter}: {side.title}{commit}{changed}")
        print_text(terminal, f"{counted(asked.rounds, 'round')} in turns, after one that does not count.")
        print_text(terminal, f"What runs print: {bench.folder}")
        bench.run()
    if bench is None:  # a signal came first
        return exit_code_of(stop.signum or 0)
    _show(terminal, bench, unit)
    if stop.signum is not None:
        print_text(terminal, f"Stopped after {len(bench.rounds)} of {counted(asked.rounds, 'round')}.")
        return exit_code_of(stop.signum)
    return _judged(terminal, bench, asked.max_slower)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command("bench"),
        description="Train a configuration in turns against another commit, and compare the time a sample takes. "
        " The working tree is taken as it is, with uncommitted changes.",
    )
    parser.add_argument("overrides", nargs="*", help=f"as for {command('train')}, e.g. trainer.max_steps=300")
    parser.add_argument(
        "--against",
        required=True,
        metavar="COMMIT",
        help="the reference: a commit, branch or tag of this repository",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        metavar="N",
        help=f"how often both run (default: {ROUNDS}; fewer give a wide interval, an even number lets drift cancel)",
    )
    add_max_slower(parser, "exit code 1 if it is slower than the reference by more than this, beyond noise: 5%%")
    return parser


def _check(overrides: Sequence[str]) -> None:
    """Raises an error about overrides that have no meaning for a bench."""
    for text in overrides:
        key, value = key_value(text)
        if key in ("resume", "rerun") and not is_null(unquoted(value)):
            raise ConfigError.of(text, "is about one training, and a bench starts many.", "Leave it out.")


def _show(terminal: Answer, bench: Bench, unit: str) -> None:
    ratio = bench.ratio
    if ratio is not None:
        heads = (f"A {unit}/s", f"B {unit}/s", "B's time to A's")
        table = TextTable("round", "order", *heads, numbers=heads)
        for number, each in enumerate(bench.rounds, 1):
            table.add_row(str(number), each.order, *map(show_count, each.rates), f"{each.time_ratio:.3f}")
        terminal.print()
        terminal.print(table)
        for part in differing_table(bench.rounds[0].pair):
            print_text(terminal, part) if isinstance(part, str) else terminal.print(part)
        has_ends = ratio.low is not None and ratio.high is not None
        between = f" (95 % interval {ratio.low:.3f} to {ratio.high:.3f})" if has_ends else ""
        print_text(terminal, f"\nMean {ratio.factor:.3f}{between}")
    if len(bench.rounds) == 1:
        print_text(terminal, "One round: the interval is that of its steps, and noise between runs is not seen.")
    print_text(terminal, f"Written: {bench.folder / RESULT}")


def _judged(terminal: Answer, bench: Bench, limit_frac: float | None) -> int:
    ratio = bench.ratio
    if bench.faults or ratio is None:
        return no_verdict(bench.faults)
    found = Slowdown(ratio, limit_frac or 0.0)
    if limit_frac is None:
        print_text(terminal, f"{found.measured}.")
        return EXIT_OK
    print_text(terminal, found.verdict)
    return EXIT_FAILED if found.is_beyond_limit else EXIT_OK
