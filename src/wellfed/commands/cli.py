"""Calls the command that follows ``python -m wellfed``: one line each in COMMANDS, imported only then."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from wellfed.commands.ended import all_shown, tell
from wellfed.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RUN, EXIT_OK


@dataclass(frozen=True)
class Command:
    """One word after ``python -m wellfed``, and the file beside this one that does it.

    The file offers ``main(argv: Sequence[str]) -> int`` for the words after the name, ``--help`` among them.
    """

    name: str
    summary: str
    composes: bool = True
    """Its words are a run's configuration, or make one; else no fault of it is in a configuration."""


COMMANDS = (
    Command("add", "a workload of your own to start from: add workload NAME"),
    Command("doctor", "the machine, the profile it maps to, what is missing", composes=False),
    Command("plan", "every number of a run with its reason, without running it"),
    Command("monitor", "all GPUs and the host, live, whatever trains there; then a verdict", composes=False),
    Command("diagnose", "where a run lost its time, again from its files", composes=False),
    Command("report", "report.html of a run again, or two runs side by side", composes=False),
    Command("runs", "the newest runs: what became of each, rate, share of the ceiling, a metric", composes=False),
    Command("leaderboard", "the ranks of a sweep, and its files anew", composes=False),
    Command("choose", "the winner of a sweep as options of loader and memory"),
    Command("fit", "the micro-batch that this device can take, by running a few sizes"),
    Command("cache", "what is kept so that it is made once: cache list, cache clear", composes=False),
    Command("shards", "a folder of recordings by class as a few tar files, which are read faster", composes=False),
    Command("completion", "what turns on tab completion in your shell", composes=False),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command that the first word names and gives its exit code; a user's error is its message alone."""
    command = next((command for command in COMMANDS if argv and command.name == argv[0]), None)
    try:
        return all_shown(_without_command(argv) if command is None else _run(command, argv[1:]))
    except SystemExit as ended:  # argparse's: help, or a wrong word
        ended.code = all_shown(int(ended.code or 0))
        raise
    except Exception as error:  # noqa: BLE001  raised again where a traceback helps
        is_of_configuration = command is None or command.composes
        heading = "" if is_of_configuration else f"python -m wellfed {argv[0]}: this can't be done."
        return tell(error, heading=heading)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(command: Command, words: Sequence[str]) -> int:
    return int(importlib.import_module(f"wellfed.commands.{command.name}").main(words))


def _without_command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_NOTHING_RUN
    close = difflib.get_close_matches(argv[0], [command.name for command in COMMANDS], n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    print(f"python -m wellfed {argv[0]}: there is no such command.{meant}\n\n{usage()}", file=sys.stderr)
    return EXIT_NOTHING_RUN


def usage() -> str:
    """All commands with what they do."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(["usage: python -m wellfed <command> [--help]", "", *lines])
