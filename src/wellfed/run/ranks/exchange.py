"""Exchanges objects between the ranks of one run, by way of their `RankStore`.

It works before the collectives of torch exist, and where one of them hangs. Whoever waits for a rank gets an exception
when that rank, or any other, has failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from wellfed.errors import EXIT_FAILED, ConfigError, first_line
from wellfed.ranks import Launch
from wellfed.run.ending import OK, Outcome, RankEnded
from wellfed.run.ranks import store as stores
from wellfed.run.ranks.ends import LEAVE_S, Ends
from wellfed.run.ranks.signs import BEAT_S
from wellfed.run.ranks.store import Address, RankStore, StoreGone

_LOG = logging.getLogger(__name__)
COME_S = 300.0
"""Seconds that ranks wait for one another at the start: each imports torch first, maybe from a slow disk."""
REFUSED_S = 60.0
"""Seconds that rank 0 waits for the others where it only has to report that nothing is run."""


class Exchange:
    """One rank's part in the exchange. It is opened at its first use, which imports torch.

    Args:
        address: of the store, where another process has passed it on; else it is found through the launcher.
    """

    def __init__(self, launch: Launch, address: Address | None = None) -> None:
        self.launch = launch
        self.ends = Ends(launch)
        self._address = address
        self._opened: RankStore | None = None
        self._uses: Counter[str] = Counter()
        self._is_closed = False

    @property
    def address(self) -> Address:
        """Where another process on this machine joins."""
        return self._store().address

    def broadcast(self, kind: str, content: Any = None) -> Any:
        """Returns what rank 0 gives. All ranks call it, equally often for each kind.

        Raises:
            RankEnded: a rank has ended before.
        """
        store, key = self._store(), f"{kind}/{self._next(kind)}"
        if self.launch.rank > 0:
            return self._await(key, 0)
        store.put(key, content)
        return content

    def gather(self, kind: str, own: Any) -> list[Any]:
        """Returns what all ranks give, in their order, on rank 0. Other ranks get an empty list and don't wait.

        Raises:
            RankEnded: a rank has ended before.
        """
        store, prefix = self._store(), f"{kind}/{self._next(kind)}"
        if self.launch.rank == 0:
            return [own, *(self._await(f"{prefix}/{rank}", rank) for rank in range(1, self.launch.world_size))]
        with self.ends.gone_with_store():
            store.put(f"{prefix}/{self.launch.rank}", own)
        return []

    def all_gather(self, kind: str, own: Any) -> list[Any]:
        """Returns what all ranks give, in their order, on all of them.

        Raises:
            RankEnded: a rank has ended before.
        """
        found: list[Any] = self.broadcast(f"all of {kind}", self.gather(kind, own))
        return found

    def post(self, kind: str, content: Any) -> None:
        """Leaves a message for rank 0, which reads it within `receiving`; it is dropped if rank 0 is gone."""
        with suppress(RankEnded), self.ends.gone_with_store():
            self._store().put(f"{kind}/{self._next(kind)}/{self.launch.rank}", content)

    @contextmanager
    def receiving(self, kind: str, ranks: Sequence[int], handler: Callable[[Any], None]) -> Iterator[None]:
        """Hands messages that these ranks post to a handler, in a thread that ends with the block.

        A handler that raises still gets the next message.
        """
        is_over, read = threading.Event(), Counter[int]()

        def receive() -> None:
            with suppress(StoreGone):
                while not is_over.wait(BEAT_S):
                    self._receive(kind, ranks, read, handler)
                self._receive(kind, ranks, read, handler)  # what came meanwhile

        thread = threading.Thread(target=receive, name="wellfed-receiving", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(LEAVE_S)

    def close(self, outcome: Outcome = OK) -> None:
        """Reports the end of this rank, and waits shortly until it was read. Ranks that come late read it too."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._opened is None and self.launch.rank == 0:
            with suppress(ConfigError, OSError, RuntimeError, RankEnded):
                self._store(come_s=REFUSED_S)
        self.ends.report(outcome)
        self.ends.stop()

    def _next(self, kind: str) -> int:
        self._uses[kind] += 1
        return self._uses[kind]

    def _await(self, key: str, rank: int) -> Any:
        """Returns an object that a rank sends, once it is there."""
        store, wait_s = self._store(), 0.005
        with self.ends.gone_with_store():
            while not store.has(key):
                self.ends.check(rank)
                time.sleep(wait_s)
                wait_s = min(0.2, 1.5 * wait_s)
            try:
                return store.take(key, is_last=self.launch.rank == 0)
            except StoreGone:
                raise
            except Exception as error:  # unpickling may raise anything
                message = f"What rank {rank} says can't be read on rank {self.launch.rank}: {first_line(error)}"
                advice = "They run different versions of the code: make it the same on all machines."
                raise RankEnded(Outcome("failed", EXIT_FAILED, "code", message, advice)) from error

    def _receive(self, kind: str, ranks: Sequence[int], read: Counter[int], handler: Callable[[Any], None]) -> None:
        store = self._store()
        for rank in ranks:
            while store.has(key := f"{kind}/{read[rank] + 1}/{rank}"):
                read[rank] += 1
                try:
                    handler(store.take(key, is_last=True))
                except StoreGone:
                    raise
                except Exception:  # noqa: BLE001  the next message may be handled
                    _LOG.exception("A message of rank %d can't be handled (%s).", rank, kind)

    def _store(self, come_s: float | None = None) -> RankStore:
        """Returns the store, opened at the first call.

        Raises:
            ConfigError: ranks have not come within the time.
        """
        if self._opened is None:
            come_s, launch = COME_S if come_s is None else come_s, self.launch
            if launch.rank == 0:
                store = stores.serve()
            else:
                store = stores.found(launch, come_s) if self._address is None else stores.joined(self._address)
            store.enter(launch.rank, launch.node)
            self._opened = store
            self.ends.signs.find_members(store)
            self.ends.start(store)
            if launch.rank == 0 and launch.by != "Lightning":
                stores.publish(store, launch, come_s)
                self._await_members(store, come_s)
        return self._opened

    def _await_members(self, store: RankStore, come_s: float) -> None:
        signs, world_size = self.ends.signs, self.launch.world_size
        until_s = time.monotonic() + come_s
        while len(signs.members) < world_size:
            if time.monotonic() > until_s:
                missing = sorted(set(range(world_size)) - signs.members.keys())
                problem = (
                    f"{signs.named(*missing).lower()} of {world_size} did not come within {come_s:.0f} s: were they "
                    "started, and do their machines reach this one?"
                )
                raise ConfigError.of(self.launch.by, problem, "What they say themselves is in their own output.")
            time.sleep(0.02)
            signs.find_members(store)
