"""Forked processes as ranks of a run, which can be stopped and killed as real ones are."""

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wellfed.process import fork
from wellfed.ranks import Launch
from wellfed.run.ranks.exchange import Exchange
from wellfed.train.lightning import trainer  # noqa: F401  each rank would import it by itself

LIMIT_S = 60


def launch(rank: int, world_size: int, *, on_one_machine: bool = False) -> Launch:
    """A rank of torchrun's, on one machine or each on its own."""
    if on_one_machine:
        return Launch("torchrun", rank, rank, 0, world_size, 1, world_size)
    return Launch("torchrun", rank, 0, rank, world_size, world_size, 1)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Ranks:
    """Ranks, each with an exchange in a process of its own; what a rank's job returns is its result."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._ids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def start(self, launched: Launch, job: Callable[[Exchange], Any]) -> int:
        """Starts a rank; returns the id of its process."""
        own = fork()
        if own:
            self._ids[launched.rank] = own
            return own
        try:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            exchange = Exchange(launched)
            try:
                result: Any = job(exchange)
            except Exception as error:  # noqa: BLE001  it is the result
                result = str(error)
            (self._folder / f"result{launched.rank}").write_bytes(pickle.dumps(result))
            exchange.close()
        finally:
            os._exit(0)

    def signal(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self._ids[rank], number)

    def code(self, rank: int) -> int:
        """Waits for the end of a rank; returns its exit code, negative if a signal has ended it."""
        until_s = time.monotonic() + LIMIT_S
        while rank not in self._codes:
            ended, status = os.waitpid(self._ids[rank], os.WNOHANG)
            if ended:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < until_s, f"rank {rank} does not end"
            time.sleep(0.02)
        return self._codes[rank]

    def result(self, rank: int) -> Any:
        """Waits for the end of a rank; returns its result, or the text of the exception that ended its job."""
        assert self.code(rank) == 0
        return pickle.loads((self._folder / f"result{rank}").read_bytes())

    def end(self) -> None:
        """Ends what still runs."""
        for rank, own in self._ids.items():
            if rank not in self._codes:
                os.kill(own, signal.SIGKILL)
                os.waitpid(own, 0)


@contextmanager
def ranks_in(folder: Path) -> Iterator[Ranks]:
    made = Ranks(folder)
    try:
        yield made
    finally:
        made.end()
