"""Exchanges objects between the ranks of one run, through a store of torch.distributed.

Works before torch's collectives exist, and while one of them hangs. A waiting rank gets an exception when any rank has
failed. Objects are signed, so that only objects from ranks of this run are unpickled.
"""

from __future__ import annotations

import hmac
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from wellfed.errors import EXIT_FAILED, ConfigError, first_line
from wellfed.ranks import Launch
from wellfed.run.outcome import OK, Outcome, RankEnded
from wellfed.run.ranks import store as stores
from wellfed.run.ranks.rank_watch import BEAT_S, RankOutcomes
from wellfed.run.ranks.store import Address

_LOG = logging.getLogger(__name__)
COME_S = 300.0
"""Seconds that ranks wait for one another at the start. Each imports torch first, maybe from a slow disk."""
REFUSED_S = 60.0
"""Seconds that rank 0 waits for the others if it only has to report that nothing is run."""
_DIGEST_BYTES = 32


class Exchange:
    """One rank's end of the exchange. It is opened at its first use, which imports torch.

    Args:
        address: address of the store if another process passed it on; None = find it through the launcher.
    """

    def __init__(self, launch: Launch, address: Address | None = None) -> None:
        self.launch = launch
        self.outcomes = RankOutcomes(launch)
        self._given = address
        self._port, self._key = 0, b""
        self._is_open = self._is_closed = False
        self._launchers: Any = None
        self._uses: Counter[str] = Counter()

    @property
    def address(self) -> Address:
        """Address at which another process on this machine joins."""
        self._open()
        return ["localhost"], self._port, self._key

    def broadcast(self, kind: str, content: Any = None) -> Any:
        """Returns rank 0's object. All ranks call it, equally often for each kind.

        Raises:
            RankEnded: a rank has ended before.
        """
        self._open()
        key = self._next(kind)
        if self.launch.rank > 0:
            return self._await(key, 0)
        self._put(key, content)
        return content

    def gather(self, kind: str, own: Any) -> list[Any]:
        """Returns the objects of all ranks, in their order, on rank 0. Other ranks get an empty list and don't wait.

        Raises:
            RankEnded: a rank has ended before.
        """
        self._open()
        key = self._next(kind)
        if self.launch.rank == 0:
            return [own, *(self._await(f"{key}/{rank}", rank) for rank in range(1, self.launch.world_size))]
        self._put(f"{key}/{self.launch.rank}", own)
        return []

    def all_gather(self, kind: str, own: Any) -> list[Any]:
        """Returns the objects of all ranks, in their order, on each of them.

        Raises:
            RankEnded: a rank has ended before.
        """
        found: list[Any] = self.broadcast(f"all of {kind}", self.gather(kind, own))
        return found

    def post(self, kind: str, content: Any) -> None:
        """Leaves a message for rank 0, which reads it within `receiving`. It is dropped if rank 0 is gone."""
        with suppress(RankEnded):
            self._put(f"{self._next(kind)}/{self.launch.rank}", content)

    def publish(self, kind: str, content: Any) -> None:
        """Leaves an object for `latest`, in place of the previous one of this rank. Does not wait for another rank.

        Raises:
            RankEnded: rank 0, which serves the store, is gone.
        """
        self._open()
        self._put(f"latest {kind}/{self.launch.rank}", content)

    def latest(self, kind: str) -> list[Any]:
        """Returns, on rank 0, the latest object of each rank that has left a readable one, in the order of ranks.
        Objects of ranks that have ended stay. Does not wait for another rank.

        Raises:
            RankEnded: the store is closed.
        """
        self._open()
        keys = [f"latest {kind}/{rank}" for rank in range(self.launch.world_size)]
        found = []
        for signed in stores.contents(self.outcomes.ask, keys):
            with suppress(Exception):  # unpickling may raise anything
                found.append(self._opened(signed))
        return found

    @contextmanager
    def receiving(self, kind: str, ranks: Sequence[int], handler: Callable[[Any], None]) -> Iterator[None]:
        """Passes messages of these ranks to a handler, in a thread that ends with the block. A handler that raises
        still gets the next message."""
        is_over, read = threading.Event(), Counter[int]()

        def receive() -> None:
            with suppress(RankEnded):
                while not is_over.wait(BEAT_S):
                    self._receive(kind, ranks, read, handler)
                self._receive(kind, ranks, read, handler)  # messages that came meanwhile

        thread = threading.Thread(target=receive, name="wellfed-receiving", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(5 * BEAT_S)

    def close(self, outcome: Outcome = OK) -> None:
        """Reports the end of this rank, and waits shortly until it was read. Ranks that join late read it too."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.launch.rank == 0 or self._given is not None:
            with suppress(ConfigError, OSError, RuntimeError, RankEnded):
                self._open(come_s=REFUSED_S)
        self.outcomes.report(outcome)
        self.outcomes.stop()

    def _next(self, kind: str) -> str:
        self._uses[kind] += 1
        return f"{kind}/{self._uses[kind]}"

    def _put(self, key: str, content: Any) -> None:
        data = pickle.dumps(content)
        self.outcomes.ask("set", key, self._signature(data) + data)

    def _take(self, key: str, *, is_last: bool) -> Any:
        signed: bytes = self.outcomes.ask("get", key)
        if is_last:
            self.outcomes.ask("delete_key", key)
        return self._opened(signed)

    def _opened(self, signed: bytes) -> Any:
        data = signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(signed[:_DIGEST_BYTES], self._signature(data)):
            raise ValueError("it was signed by another run")
        return pickle.loads(data)

    def _signature(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")

    def _await(self, key: str, rank: int) -> Any:
        """Returns an object from a rank, once it is there. torch's own wait prints a warning at its timeout."""
        wait_s = 0.005
        while not self.outcomes.ask("check", [key]):
            self.outcomes.check(rank)
            time.sleep(wait_s)
            wait_s = min(0.2, 1.5 * wait_s)
        try:
            return self._take(key, is_last=self.launch.rank == 0)
        except RankEnded:
            raise
        except Exception as error:  # unpickling may raise anything
            message = f"What rank {rank} says can't be read on rank {self.launch.rank}: {first_line(error)}"
            advice = "They run different versions of the code: make it the same on all machines."
            raise RankEnded(Outcome("failed", EXIT_FAILED, "code", message, advice)) from error

    def _receive(self, kind: str, ranks: Sequence[int], read: Counter[int], handler: Callable[[Any], None]) -> None:
        for rank in ranks:
            while self.outcomes.ask("check", [key := f"{kind}/{read[rank] + 1}/{rank}"]):
                read[rank] += 1
                try:
                    handler(self._take(key, is_last=True))
                except RankEnded:
                    raise
                except Exception:  # noqa: BLE001  the next message may be handled
                    _LOG.exception("A message of rank %d can't be handled (%s).", rank, kind)

    def _open(self, come_s: float | None = None) -> None:
        """Opens the store at the first call. Rank 0 waits for all ranks that the launcher has started.

        Raises:
            ConfigError: ranks have not joined within the time.
        """
        if self._is_open:
            return
        self._is_open = True
        come_s, launch = COME_S if come_s is None else come_s, self.launch
        stores.allow_open_files(4 * launch.world_size + 1024)
        if launch.rank == 0:
            store, self._key = stores.serve()
        else:
            store, self._key = stores.find(launch, come_s) if self._given is None else stores.connect(self._given)
        self._port = store.port
        self.outcomes.start(store)
        if launch.rank == 0 and launch.by != "Lightning":
            self._launchers = stores.publish(self._port, self._key, launch, come_s)
            until_s, all_ranks = time.monotonic() + come_s, range(launch.world_size)
            while missing := self.outcomes.members.missing({*all_ranks}):
                if time.monotonic() > until_s:
                    problem = (
                        f"{self.outcomes.members.named(*missing).lower()} of {launch.world_size} did not come within "
                        f"{come_s:.0f} s: were they started, and do their machines reach this one?"
                    )
                    raise ConfigError.of(launch.by, problem, "Their own output has the reason.")
                time.sleep(0.02)
