"""Calls the command that follows ``python -m wellfed``: one line each in COMMANDS, imported only then."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from wellfed.commands.ended import tell
from wellfed.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RUN, EXIT_OK


@dataclass(frozen=True)
class Command:
    """One word after ``python -m wellfed``, and the file beside this one that does it.

    The file offers ``main(argv: Sequence[str]) -> int`` for the words after the name, ``--help`` among them.
    """

    name: str
    summary: str


COMMANDS = (
    Command("add", "a workload of your own to start from: add workload NAME"),
    Command("doctor", "the machine, the profile it maps to, what is missing"),
    Command("plan", "every number of a run with its reason, without running it"),
    Command("monitor", "all GPUs and the host, live, whatever trains there; then a verdict"),
    Command("diagnose", "where a run lost its time, again from its files"),
    Command("report", "report.html of a run again, or two runs side by side"),
    Command("runs", "the newest runs: what became of each, rate, share of the ceiling, a metric"),
    Command("leaderboard", "the ranks of a sweep, and its files anew"),
    Command("choose", "the winner of a sweep as options of loader and memory"),
    Command("fit", "the micro-batch that this device can take, by running a few sizes"),
    Command("completion", "what turns on tab completion in your shell"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command that the first word names and gives its exit code; a user's error is its message alone."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_NOTHING_RUN
    command = next((command for command in COMMANDS if command.name == argv[0]), None)
    if command is None:
        close = difflib.get_close_matches(argv[0], [command.name for command in COMMANDS], n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        print(f"python -m wellfed {argv[0]}: there is no such command.{meant}\n\n{usage()}", file=sys.stderr)
        return EXIT_NOTHING_RUN
    try:
        return int(importlib.import_module(f"wellfed.commands.{command.name}").main(argv[1:]))
    except Exception as error:  # noqa: BLE001  raised again where a traceback helps
        return tell(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def usage() -> str:
    """All commands with what they do."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(["usage: python -m wellfed <command> [--help]", "", *lines])
