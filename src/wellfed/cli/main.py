"""Runs the command that follows ``wellfed`` or ``python -m wellfed``; COMMANDS lists all, and imports one when it runs.

The entry scripts of a project call `main` too, with ``train``, ``tune`` or ``evaluate`` as first argument.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from wellfed import __version__, project
from wellfed.cli.exit_code import all_shown, report_error
from wellfed.command_line import ENTRIES, command, is_command
from wellfed.config.faults.gone import what_instead
from wellfed.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RUN, EXIT_OK, in_environment
from wellfed.process import without_collections


@dataclass(frozen=True)
class Command:
    """A subcommand of ``wellfed``.

    ``commands/<name>.py`` has ``main(argv: Sequence[str]) -> int``, with the arguments after the name. The functions of
    `ENTRIES` are in ``commands/entry_scripts.py``.
    """

    name: str
    summary: str
    composes: bool = True
    """Whether the arguments are, or make, the configuration of a run."""
    option: str = ""
    """The name is short for ``train -m name=option``, unless another option of that group is typed."""


COMMANDS = (
    Command("train", "train, validate and test: [overrides]"),
    Command("sweep", "measure combinations of settings: train -m sweep=throughput", option="throughput"),
    Command("search", "many whole trainings, ranked by a metric: train -m search=optuna", option="optuna"),
    Command("tune", "find faster settings for this machine, and write them as an experiment"),
    Command("evaluate", "the metrics of a checkpoint on the test split"),
    Command("plan", "every number of a run with its reason, without running it"),
    Command("fit", "the micro-batch that this device can take, by running a few sizes"),
    Command("watch", "any PyTorch script, unchanged: where its time goes, and what to change", composes=False),
    Command("bench", "a configuration in turns against another commit: is it slower?"),
    Command("doctor", "the machine, the profile it maps to, what is missing", composes=False),
    Command("monitor", "all GPUs and the host, live, whatever trains there; then a verdict", composes=False),
    Command("diagnose", "where a run lost its time, again from its files", composes=False),
    Command("report", "report.html of a run again, or runs side by side", composes=False),
    Command("runs", "the newest runs: outcome, verdict, rate, share of the ceiling, what was typed", composes=False),
    Command("leaderboard", "the ranks of a sweep, and its files anew", composes=False),
    Command("choose", "the winner of a sweep as an experiment"),
    Command("add", "a workload of your own to start from: add workload NAME"),
    Command("cache", "what is kept so that it is made once: cache list, cache clear", composes=False),
    Command("shards", "a folder of recordings by class as a few tar files, which are read faster", composes=False),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command named by the first argument and returns its exit code. A user's error prints its message."""
    if list(argv[:1]) == ["watch"]:  # exit code and output are the script's own
        return _run(next(each for each in COMMANDS if each.name == "watch"), argv[1:])
    with in_environment():
        argv = _expanded(argv)
        asked = next((each for each in COMMANDS if argv and each.name == argv[0]), None)
        try:
            return all_shown(_without_command(argv) if asked is None else _run(asked, argv[1:]))
        except SystemExit as ended:  # argparse's: help, or a wrong argument
            ended.code = all_shown(int(ended.code or 0))
            raise
        except Exception as error:  # noqa: BLE001  raised again where a traceback helps
            is_other = asked is not None and not asked.composes
            return report_error(error, heading=f"{command(argv[0])}: this can't be done." if is_other else "")
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def _expanded(argv: Sequence[str]) -> list[str]:
    """Replaces a short name by its arguments of ``train``. Other ranks read the command line this way too."""
    asked = next((each for each in COMMANDS if argv and each.name == argv[0]), None)
    if asked is None or not asked.option:
        return list(argv)
    has_option = any(word.startswith(f"{asked.name}=") for word in argv)
    expanded = ["train", "-m", *([] if has_option else [f"{asked.name}={asked.option}"]), *argv[1:]]
    if is_command():
        sys.argv[1:] = expanded
    return expanded


def _run(asked: Command, words: Sequence[str]) -> int:
    for word in words[:1] if asked.name == "watch" else words:  # words behind a script are its own
        if instead := what_instead(f"wellfed {asked.name} {word}"):
            print(instead, file=sys.stderr)
            return EXIT_NOTHING_RUN
    if asked.composes:
        project.add_sources()
    file, function = ("entry_scripts", asked.name) if asked.name in ENTRIES else (asked.name, "main")
    with without_collections():
        module = importlib.import_module(f"wellfed.cli.commands.{file}")
    return int(getattr(module, function)(words))


def _without_command(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        print(f"wellfed {__version__}")
        return EXIT_OK
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_NOTHING_RUN
    if instead := what_instead(f"wellfed {argv[0]}"):
        print(instead, file=sys.stderr)
        return EXIT_NOTHING_RUN
    close = difflib.get_close_matches(argv[0], [each.name for each in COMMANDS], n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    print(f"{command(argv[0])}: there is no such command.{meant}\n\n{usage()}", file=sys.stderr)
    return EXIT_NOTHING_RUN


def usage() -> str:
    """Returns all commands with their descriptions."""
    width = max(len(each.name) for each in COMMANDS)
    lines = [f"  {each.name:<{width}}  {each.summary}" for each in COMMANDS]
    return "\n".join([f"usage: {command('').rstrip()} <command> [--help], or --version", "", *lines])
