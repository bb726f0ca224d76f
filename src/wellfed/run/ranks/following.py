"""Makes all ranks of a run work on what rank 0 has composed: one configuration, one folder.

Ranks that torchrun or srun has started wait for rank 0's broadcast. Lightning starts ranks when rank 0 begins to train.
These find a file whose path is in their environment (`invite`, `invited`).
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED
from wellfed.ranks import INVITATION, lightnings_launch, own_rank
from wellfed.run.folder.resume import Target
from wellfed.run.ranks.exchange import Exchange

_POLL_S = 1.0
"""Seconds between looks at whether rank 0 still lives."""


@dataclass(frozen=True)
class SharedRun:
    """The run that all ranks work on, as rank 0 has composed it."""

    composed: Composed[RunConfig]
    target: Target | None
    folder: Path


def invite(shared: SharedRun, world_size: int) -> Exchange:
    """Opens the exchange on rank 0 and leaves its address and the run for the ranks that Lightning will start. Only
    this user can read the file, which has the configuration with its secrets."""
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
    """Returns the content of `invite`'s file, in a process that Lightning has started for another rank; else None.

    This process then ends with its parent, rank 0: a collective of a GPU would wait for it.
    """
    path, rank = os.environ.get(INVITATION), own_rank()
    if path is None or rank == 0:
        return None
    threading.Thread(target=_end_with, args=[os.getppid()], name="wellfed-parent", daemon=True).start()
    address, shared, world_size = pickle.loads(Path(path).read_bytes())
    return Exchange(lightnings_launch(rank, world_size), address), shared


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # this rank may just end by itself
    os._exit(EXIT_FAILED)
