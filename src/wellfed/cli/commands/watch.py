"""Runs a PyTorch script as it is, and reports where its time went (``wellfed watch train.py``)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wellfed.command_line import command
from wellfed.errors import EXIT_NOTHING_RUN
from wellfed.watch.script_process import Script, end_by_interrupt, run
from wellfed.watch.watched_script import WatchedScript


def main(argv: Sequence[str]) -> int:
    """Returns the script's exit code. Its output is its own; the last screen goes to stderr."""
    typed, (own, words) = list(sys.argv), _split(argv)
    asked = _parser().parse_args(own)
    is_module = asked.module is not None
    if not is_module and not words:
        _parser().error("name a script, or a module after -m")
    name, *arguments = [asked.module, *words] if is_module else words
    if not is_module and not os.path.exists(name):
        print(f"{command('watch')} {name}: there is no such file.", file=sys.stderr)
        return EXIT_NOTHING_RUN
    script = Script(name, tuple(arguments), is_module=is_module)
    watched = WatchedScript(script, Path(asked.log_dir))
    watched.start()
    end = run(script)
    sys.argv = typed
    try:
        watched.finish(end)
    except KeyboardInterrupt:
        print(f"{command('watch')}: interrupted; {command('report')} writes the pages again.", file=sys.stderr)
    if end.is_interrupt:
        end_by_interrupt()
    return end.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command("watch"),
        usage=f"{command('watch')} [--log-dir FOLDER] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Runs a PyTorch script unchanged. At its end: verdict, what to change, a page. Its output and its "
        "exit code stay its own. Under torchrun: torchrun --nproc-per-node 2 --no-python wellfed watch SCRIPT",
    )
    parser.add_argument("--log-dir", default="logs", metavar="FOLDER", help="where to write (default: logs)")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command's own words, and those from the script on, or behind the module. These are the script's,
    whatever they look like."""
    own, left = list[str](), list(argv)
    while left and left[0] != "--" and left[0].startswith("-"):
        number = 2 if left[0] in ("-m", "--log-dir") else 1
        own += left[:number]
        left = left[number:]
        if "-m" in own:
            return own, left
    return own, left[left[:1] == ["--"] :]
