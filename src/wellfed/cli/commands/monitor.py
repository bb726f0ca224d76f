"""Watches all GPUs and the host while any program runs (``python -m wellfed monitor``)."""

from __future__ import annotations

import argparse
import io
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from wellfed.command_line import command
from wellfed.errors import EXIT_OK, NotShown
from wellfed.observe.telemetry.sampler import next_beat
from wellfed.process import Stopped, StopRequest, exit_code_of
from wellfed.run.screen import Terminal
from wellfed.units import counted
from wellfed.watch.curve_file import new_file, rows_of
from wellfed.watch.monitor import Monitor
from wellfed.watch.screens import Screen
from wellfed.watch.seen_gpus import find_gpus

SHORTEST_S = 0.1
"""Minimum seconds between readings, as for telemetry.interval_s."""
FIRST_S = 0.3
"""Seconds until the table is first shown."""
MOST_S = 1.0
"""Maximum seconds until an event is shown."""


def main(argv: Sequence[str]) -> int:
    """Watches for the requested time. Returns 0, or 130 or 143 if a signal ended it earlier."""
    asked = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may hold characters that this terminal can't write
    stop, terminal = StopRequest(), Terminal(markup=False, highlight=False, emoji=False)
    with stop.listening(), suppress(Stopped):
        _watch(asked, stop, terminal)
    if terminal.failure is not None:
        raise NotShown(terminal.failure)
    if stop.signum is None or (stop.signum == signal.SIGINT and asked.seconds == 0):
        return EXIT_OK
    return exit_code_of(stop.signum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command("monitor"),
        description="How busy all GPUs and the host are, live, whatever runs there; then means, peaks and a verdict.",
    )
    parser.add_argument(
        "--for",
        "--seconds",
        dest="seconds",
        type=partial(_time, least_s=0, limits="0 on; 0 = until Ctrl-C"),
        default=0.0,
        metavar="SECONDS",
        help="how long, e.g. 300; 0 = until Ctrl-C (default)",
    )
    parser.add_argument("--csv", type=Path, metavar="F", help="also write each reading to this file, a new one")
    parser.add_argument("--gpus", type=_numbers, metavar="0,1", help="these only, as nvidia-smi numbers them")
    parser.add_argument(
        "--interval",
        type=partial(_time, least_s=SHORTEST_S, limits=f"{SHORTEST_S:g} on"),
        default=0.5,
        metavar="SECONDS",
        help="between readings, e.g. 0.2 (default: 0.5)",
    )
    return parser


def _watch(asked: argparse.Namespace, stop: StopRequest, terminal: Terminal) -> None:
    how_long, until = f"for {asked.seconds:g} s", f" of {asked.seconds:g} s"
    if asked.seconds == 0:
        how_long, until = "until Ctrl-C", ", until Ctrl-C"
    is_live = sys.stdout is not None and sys.stdout.isatty() and not terminal.is_dumb_terminal
    screen = Screen(terminal, until, is_live=is_live)
    found = find_gpus() if asked.gpus is None else find_gpus().only(asked.gpus)
    monitor = Monitor(found, interval_s=asked.interval)
    if asked.csv is not None:
        table = new_file(asked.csv, monitor.add_line)
        monitor.add_receiver(lambda samples: table.append(*rows_of(samples)))
    what = counted(len(found.gpus), "GPU") + " and the host" if found.gpus else "the host alone"
    screen.print_line(f"Watching {what} {how_long}.")
    if found.problem is not None:
        screen.print_line(f"No GPU figures (NVML: {found.problem}). {command('doctor')} says what is missing.")
    with monitor:
        stop.is_stepping = True
        try:
            _show(monitor, screen, terminal, asked, stop)
        finally:
            stop.is_finishing = True  # a second Ctrl-C must not suppress the summary
            screen.close()
    for line in [*monitor.new_lines(), *monitor.summary()]:
        screen.print_line(line)


def _show(monitor: Monitor, screen: Screen, terminal: Terminal, asked: argparse.Namespace, stop: StopRequest) -> None:
    period_s, end_s = max(1.0, asked.interval), asked.seconds or math.inf
    next_s = min(FIRST_S if screen.is_live else math.inf, period_s)
    while stop.signum is None and not terminal.quiet:
        _sleep(min(MOST_S, min(next_s, end_s) - monitor.time_s()), stop)
        for line in monitor.new_lines():
            screen.print_line(line)
        now_s = monitor.time_s()
        if now_s >= next_s and stop.signum is None:
            screen.show(monitor.board, now_s)
            next_s = next_beat(0.0, now_s, period_s)
        if now_s >= end_s:
            return


def _sleep(seconds: float, stop: StopRequest) -> None:
    """Sleeps, or returns at the first signal. Signals interrupt nothing else."""
    with suppress(Stopped):
        stop.is_stepping = False
        if stop.signum is None:
            time.sleep(max(0.0, seconds))
        stop.is_stepping = True


def _time(text: str, least_s: float, limits: str) -> float:
    with suppress(ValueError):
        if least_s <= (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text}: must be seconds from {limits}")


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: must be numbers with commas between them, as 0,1")
    return [int(part) for part in parts]
