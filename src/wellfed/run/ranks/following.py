"""Makes all ranks of a run work on what rank 0 has composed: one configuration, one folder, the same code.

Ranks that torchrun or srun has started wait for it in `follow`. Lightning starts ranks when rank 0 begins to train.
These find a file whose path is in their environment (`invite`, `invited`).
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.plan.nodes import RankFacts, code_faults
from wellfed.ranks import INVITATION, Launch, lightnings_launch, own_rank
from wellfed.record import FILE_NAME, GitState, write_atomically
from wellfed.run.folder.resume import Target, checkpoints_of
from wellfed.run.outcome import Outcome
from wellfed.run.ranks.exchange import Exchange
from wellfed.units import show_text

SEEN_S = 15.0
"""Seconds until other machines see a new file on a network file system."""
_COMMON = ("torch", "lightning")
"""Packages whose versions must be the same on all machines."""


@dataclass(frozen=True)
class SharedRun:
    """The run that all ranks work on, as rank 0 has composed it."""

    composed: Composed[RunConfig]
    target: Target | None
    folder: Path
    host: str
    """Machine of rank 0."""
    pid: int
    mark: str = ""
    """Content of the file `_mark_of` in the folder."""


def lead(exchange: Exchange, shared: SharedRun, git: GitState | None) -> None:
    """Makes the other ranks, started by torchrun or srun, work on this run. Called on rank 0.

    Raises:
        ConfigError: they are missing, run other code, or don't see the folder.
        RankEnded: one of them has ended.
    """
    facts = exchange.gather("code", _facts(exchange.launch, git))
    faults = list(code_faults([one for one in facts if one is not None]))
    if faults:
        raise ConfigError(faults)
    shared = replace(shared, mark=secrets.token_hex(8))
    mark = _mark_of(shared.folder)
    mark.write_text(shared.mark, encoding="utf-8")
    try:
        exchange.broadcast("run", shared)
        blind = [where for where in exchange.gather("sees", None) if where is not None]
    finally:
        mark.unlink(missing_ok=True)
    if blind:
        problem = f"{shared.folder}, on {socket.gethostname()}, is not there on {', '.join(dict.fromkeys(blind))}."
        raise ConfigError.of("paths.log_dir", problem, "Set it to a folder on a disk that all machines share.")


def follow(exchange: Exchange, own_git: Callable[[], GitState | None]) -> SharedRun:
    """Returns the run that rank 0 leads. Called on the other ranks that torchrun or srun has started.

    Raises:
        WellfedError: rank 0 is missing, has ended, or sends something unreadable.
    """
    launch = exchange.launch
    # Once per machine: hundreds of ranks would read the same files from one file server.
    exchange.gather("code", _facts(launch, own_git()) if launch.is_first_of_node else None)
    shared: SharedRun = exchange.broadcast("run")
    exchange.outcomes.on_rank_0_gone = lambda outcome: _complete_record(launch, shared, outcome)
    is_seen = _sees(shared)
    exchange.gather("sees", None if is_seen else f"node {launch.node} ({socket.gethostname()})")
    if not is_seen:
        exchange.broadcast("plan")  # never arrives, but raises rank 0's error
    return shared


def invite(shared: SharedRun, world_size: int) -> Exchange:
    """Opens the exchange on rank 0 and leaves its address and the run for the ranks that Lightning will start. Only
    this user can read the file: it has the configuration with its secrets, and the key of the exchange."""
    exchange = Exchange(lightnings_launch(0, world_size))
    path = shared.folder / ".ranks"
    data = pickle.dumps((exchange.address, shared, world_size))
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    os.environ[INVITATION] = str(path)
    return exchange


def uninvite() -> None:
    """Removes the file of `invite`."""
    path = os.environ.pop(INVITATION, None)
    if path is not None:
        Path(path).unlink(missing_ok=True)


def invited() -> tuple[Exchange, SharedRun] | None:
    """Returns the content of `invite`'s file, in a process that Lightning has started for another rank; else None."""
    path, rank = os.environ.get(INVITATION), own_rank()
    if path is None or rank == 0:
        return None
    address, shared, world_size = pickle.loads(Path(path).read_bytes())
    exchange = Exchange(lightnings_launch(rank, world_size), address)
    exchange.outcomes.on_rank_0_gone = lambda outcome: _complete_record(exchange.launch, shared, outcome)
    return exchange, shared


def _facts(launch: Launch, git: GitState | None) -> RankFacts:
    change = "" if git is None else git.get("digest", "")
    versions = [("Python", python_version())]
    for name in _COMMON:
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


def _sees(shared: SharedRun) -> bool:
    """Returns whether this machine sees rank 0's folder, and not another one of the same name."""
    until_s = time.monotonic() + SEEN_S
    while True:
        with suppress(OSError):
            if _mark_of(shared.folder).read_text(encoding="utf-8") == shared.mark:
                return True
        if time.monotonic() > until_s:
            return False
        time.sleep(0.5)


def _complete_record(launch: Launch, shared: SharedRun, outcome: Outcome) -> None:
    """Completes rank 0's record when it is gone. Runs on rank 1, and on the first rank of each machine."""
    if launch.rank > 1 and not launch.is_first_of_node:
        return
    if checkpoints_of(shared.folder):
        outcome = replace(outcome, advice=f"resume={shared.folder} goes on from its last checkpoint.")
    path = shared.folder / FILE_NAME
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if (record["status"], record["pid"], record["host_name"]) != ("running", shared.pid, shared.host):
            return  # rank 0 has ended by itself
        error = {"kind": outcome.kind, "message": outcome.message, "advice": outcome.advice}
        record |= {"status": outcome.status, "exit_code": outcome.exit_code, "error": error}
        write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(show_text(f"{outcome.message}\n{outcome.advice}"), file=sys.stderr)
