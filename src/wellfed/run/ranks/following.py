"""Has the ranks that torchrun or srun has started follow rank 0 into its run: one configuration, folder, code."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_NOTHING_RUN, ConfigError, WellfedError
from wellfed.plan.nodes import RankFacts, code_faults
from wellfed.ranks import Launch
from wellfed.record import FILE_NAME, GitState, write_atomically
from wellfed.run.ending import Outcome, RankEnded
from wellfed.run.folder.resume import Target, checkpoints_of
from wellfed.run.ranks.line import Line
from wellfed.run.train import own_git_state, spin_less, train
from wellfed.units import show_text

SEEN_S = 15.0
"""How long a file may take until other machines see it: network file systems look again after some seconds."""
_TALKED_BY = ("torch", "lightning")


@dataclass(frozen=True)
class Word:
    """What rank 0 has composed and decided before anything is read."""

    composed: Composed[RunConfig]
    target: Target | None
    folder: Path
    mark: str
    """Content of the file `_mark_of` in the folder."""
    host: str
    pid: int


def lead(line: Line, composed: Composed[RunConfig], target: Target | None, folder: Path, git: GitState | None) -> None:
    """On rank 0: have the others follow into this folder.

    Raises:
        ConfigError: they are not there, run other code, or don't see the folder.
        RankEnded: one of them has ended.
    """
    told = line.gather("code", _facts(line.launch, git))
    faults = list(code_faults([facts for facts in told if facts is not None]))
    if faults:
        raise ConfigError(faults)
    place, mark = _mark_of(folder), secrets.token_hex(8)
    place.write_text(mark, encoding="utf-8")
    try:
        there = None if target is None else replace(target, checkpoint=target.checkpoint.resolve())
        line.tell("word", Word(composed, there, folder.resolve(), mark, socket.gethostname(), os.getpid()))
        blind = [where for where in line.gather("sees", None) if where is not None]
    finally:
        place.unlink(missing_ok=True)
    if blind:
        problem = f"{folder.resolve()}, on {socket.gethostname()}, is not there on {', '.join(dict.fromkeys(blind))}."
        raise ConfigError.of("paths.log_dir", problem, "Set it to a folder on a disk that all machines share.")


def follow(line: Line) -> int:
    """On another rank: do what rank 0 does."""
    launch = line.launch
    spin_less(os.environ)
    try:
        # Once a machine: hundreds of ranks would ask one file server for the same files.
        line.tell("code", _facts(launch, own_git_state()) if launch.is_first_of_node else None)
        word: Word = line.hear("word")
        line.on_gone = lambda rank, outcome: _rank_0_is_gone(launch, word, outcome)
        sees = _sees(word)
        line.tell("sees", None if sees else f"node {launch.node} ({socket.gethostname()})")
        if not sees:
            line.hear("plan")  # which does not come
    except RankEnded as ended:
        line.end(ended.outcome)  # rank 0 tells it, which does not know yet what could not be read here
        return ended.outcome.exit_code
    except WellfedError as error:
        print(show_text(str(error)), file=sys.stderr)
        return EXIT_NOTHING_RUN
    return train(word.composed, line=line, word=word)


def _facts(launch: Launch, git: GitState | None) -> RankFacts:
    change = "" if git is None else git.get("digest", "")
    versions = [("Python", python_version())]
    for name in _TALKED_BY:
        with suppress(PackageNotFoundError):
            versions.append((name, version(name)))
    return RankFacts(
        launch.rank,
        launch.node,
        socket.gethostname(),
        None if git is None else git["commit"],
        change,
        project.source_digest(),
        tuple(versions),
    )


def _mark_of(folder: Path) -> Path:
    return folder / ".seen"


def _sees(word: Word) -> bool:
    """Whether this machine sees the folder of rank 0, and not one of the same name."""
    until_s = time.monotonic() + SEEN_S
    while True:
        with suppress(OSError):
            if _mark_of(word.folder).read_text(encoding="utf-8") == word.mark:
                return True
        if time.monotonic() > until_s:
            return False
        time.sleep(0.5)


def _rank_0_is_gone(launch: Launch, word: Word, outcome: Outcome) -> None:
    """Write into its record what it can't any more."""
    if launch.rank > 1 and not launch.is_first_of_node:  # enough others do
        return
    path = word.folder / FILE_NAME
    if checkpoints_of(word.folder):
        outcome = replace(outcome, advice=f"resume={word.folder} goes on from its last checkpoint.")
    if launch.rank == 1 or launch.node > 0:
        print(show_text(f"{outcome.message}\n{outcome.advice}"), file=sys.stderr)
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if (record["status"], record["pid"], record["host_name"]) == ("running", word.pid, word.host):
            error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}
            record |= {"status": outcome.status, "exit_code": outcome.exit_code, "error": error}
            write_atomically(path, json.dumps(record, indent=1) + "\n")
