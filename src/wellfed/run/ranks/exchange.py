"""Exchanges objects between the ranks of one run, through a store of torch.distributed that rank 0 serves.

Works before torch's collectives exist, as while data are prepared. Each rank reports how it ends. A rank that is killed
reports nothing: its launcher ends the others, and torch's collectives fail.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from wellfed.errors import EXIT_FAILED, ConfigError, first_line
from wellfed.ranks import Launch
from wellfed.run.outcome import OK, Outcome, RankEnded
from wellfed.run.ranks import store as stores
from wellfed.run.ranks.store import Address

COME_S = 300.0
"""Seconds that ranks wait for one another at the start. Each imports torch first, maybe from a slow disk."""
REFUSED_S = 60.0
"""Seconds that rank 0 waits for the others if it only has to report that nothing is run."""
WAIT_S = 7200.0
"""Maximum seconds to wait for an object of another rank, which may hang alive."""
REPORT_S = 5.0
"""Seconds to wait for the report of another rank after a collective has failed."""
_LAST_RECORD_S = 30.0
"""Seconds that a failed rank leaves rank 0 to write its record, before the launcher ends it."""
_READ_S = 3.0
"""Seconds that rank 0 serves the store after its end, until the others have ended."""
_ENDS = "ends"


class Exchange:
    """One rank's end of the exchange. It is opened at its first use, which imports torch.

    Args:
        address: address of the store if another process passed it on; None = find it through the launcher.
    """

    def __init__(self, launch: Launch, address: Address | None = None) -> None:
        self.launch = launch
        self._given = address
        self._store: Any = None
        self._launchers: Any = None
        self._is_closed = False
        self._uses: Counter[str] = Counter()
        self._ends: dict[int, Outcome] = {}

    @property
    def address(self) -> Address:
        """Address at which another process on this machine joins."""
        self._open()
        return ["localhost"], self._store.port

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

    def publish(self, kind: str, content: Any) -> None:
        """Leaves an object for `latest`, in place of the previous one of this rank. Does not wait for another rank.

        Raises:
            RankEnded: rank 0, which serves the store, is gone.
        """
        self._open()
        self._put(f"latest {kind}/{self.launch.rank}", content)

    def latest(self, kind: str) -> list[Any]:
        """Returns, on rank 0, the latest object of each rank that has left one, in the order of ranks; [] on others.
        Objects of ranks that have ended stay. Does not wait for another rank.

        Raises:
            RankEnded: the store is closed.
        """
        if self.launch.rank > 0:
            return []
        self._open()
        keys = [f"latest {kind}/{rank}" for rank in range(self.launch.world_size)]
        return [pickle.loads(data) for data in stores.contents(self._ask, keys)]

    def missing(self) -> list[int]:
        """Returns the ranks that have not joined yet."""
        return [rank for rank in range(self.launch.world_size) if not self._ask("check", [f"member/{rank}"])]

    def report(self, outcome: Outcome) -> None:
        """Reports how this rank ends, if the exchange is open. Only the first report counts."""
        rank = self.launch.rank
        if rank in self._ends:
            return
        self._ends[rank] = outcome
        if self._store is not None:
            with suppress(RankEnded):
                self._ask("append", _ENDS, json.dumps([rank, asdict(outcome)]) + "\n")

    def failure(self) -> Outcome | None:
        """Returns the most informative failure that another rank has reported: not caused by another rank or a signal.

        Raises:
            RankEnded: rank 0 is gone.
        """
        self._read_ends()
        bad = [one for rank, one in self._ends.items() if one.exit_code and rank != self.launch.rank]
        return min(bad, key=lambda one: (one.is_of_other_rank, one.status == "interrupted"), default=None)

    def reason(self, own: Outcome) -> Outcome | None:
        """Returns how another rank failed by itself, if that explains why this one can't continue.

        Waits up to `REPORT_S` for a report, unless all ranks stop together.
        """
        until_s = time.monotonic() + (0.0 if own.is_of_all else REPORT_S)
        with suppress(RankEnded):
            while self._store is not None:
                found = self.failure()
                if found is not None and not found.is_of_other_rank and found.status != "interrupted":
                    return found
                if len(self._ends) >= self.launch.world_size - 1 or time.monotonic() > until_s:
                    break
                time.sleep(0.1)
        return None

    def close(self, outcome: Outcome = OK) -> None:
        """Reports the end of this rank, and waits shortly until it was read. Ranks that join late read it too."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.launch.rank == 0 or self._given is not None:
            with suppress(ConfigError, OSError, RuntimeError, RankEnded):
                self._open(come_s=REFUSED_S)
        self.report(outcome)
        with suppress(RankEnded):
            self._wait_for_readers(self._ends[self.launch.rank])

    def _wait_for_readers(self, own: Outcome) -> None:
        began_s = time.monotonic()
        if self._store is None:
            return
        if self.launch.rank == 0:
            while len(self._ends) < self.launch.world_size and time.monotonic() < began_s + _READ_S:
                self._read_ends()
                time.sleep(0.05)
        elif self.launch.by == "Lightning" and own.exit_code:
            # Lightning kills rank 0 within 5 s of a failed rank's end, and the record must be written before.
            while time.monotonic() < began_s + _LAST_RECORD_S:
                self._read_ends()  # until the store is gone
                time.sleep(0.2)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the store. Raises RankEnded if rank 0, which serves it, is gone."""
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            message = "Rank 0 is gone: it has ended or was killed, or its machine is gone."
            raise RankEnded(self._ends.get(0) or Outcome("failed", EXIT_FAILED, "code", message)) from error

    def _read_ends(self) -> None:
        for entry in filter(None, self._ask("get", _ENDS).decode().split("\n")):
            rank, fields = json.loads(entry)
            if rank not in self._ends:
                outcome = Outcome(**fields)
                if outcome.exit_code and not outcome.message.startswith("Rank "):
                    outcome = replace(outcome, message=f"{self._named(rank)}: {outcome.message}")
                self._ends[rank] = outcome

    def _named(self, rank: int) -> str:
        host = self._ask("get", f"member/{rank}").decode() if self.launch.num_nodes > 1 else ""
        return f"Rank {rank} on {host}" if host else f"Rank {rank}"

    def _next(self, kind: str) -> str:
        self._uses[kind] += 1
        return f"{kind}/{self._uses[kind]}"

    def _put(self, key: str, content: Any) -> None:
        self._ask("set", key, pickle.dumps(content))

    def _await(self, key: str, rank: int) -> Any:
        """Returns an object of a rank, once it is there. Raises RankEnded if that rank has ended or any has failed."""
        wait_s, until_s = 0.005, time.monotonic() + WAIT_S
        while not self._ask("check", [key]):
            failure = self.failure() or self._ends.get(rank) or self._ends.get(self.launch.rank)
            if failure is not None:
                raise RankEnded(failure)
            if time.monotonic() > until_s:
                message = f"{self._named(rank)} has sent nothing for {WAIT_S / 3600:g} hours ({key})."
                raise RankEnded(Outcome("failed", EXIT_FAILED, "code", message))
            time.sleep(wait_s)
            wait_s = min(0.2, 1.5 * wait_s)
        try:
            data = self._ask("get", key)
            if self.launch.rank == 0:
                self._ask("delete_key", key)
            return pickle.loads(data)
        except RankEnded:
            raise
        except Exception as error:  # unpickling may raise anything
            message = f"What rank {rank} sends can't be read on rank {self.launch.rank}: {first_line(error)}"
            advice = "They run different versions of the code: make it the same on all machines."
            raise RankEnded(Outcome("failed", EXIT_FAILED, "code", message, advice)) from error

    def _open(self, come_s: float | None = None) -> None:
        """Opens the store at the first call. Rank 0 waits for all ranks that the launcher has started.

        Raises:
            ConfigError: ranks have not joined within the time.
        """
        if self._store is not None:
            return
        launch, come_s = self.launch, COME_S if come_s is None else come_s
        if launch.rank == 0:
            self._store = stores.serve()
            self._ask("set", _ENDS, "\n")
        else:
            self._store = stores.find(launch, come_s) if self._given is None else stores.connect(self._given)
        self._ask("set", f"member/{launch.rank}", f"node {launch.node} ({socket.gethostname()})")
        if launch.rank in self._ends:
            self._ask("append", _ENDS, json.dumps([launch.rank, asdict(self._ends[launch.rank])]) + "\n")
        if launch.rank == 0 and launch.by != "Lightning":
            self._launchers = stores.publish(self._store.port, launch, come_s)
            until_s = time.monotonic() + come_s
            while missing := self.missing():
                if time.monotonic() > until_s:
                    shown = ", ".join(map(str, missing[:8]))
                    problem = (
                        f"rank{'s' if len(missing) > 1 else ''} {shown} of {launch.world_size} did not come within "
                        f"{come_s:.0f} s: were they started, and do their machines reach this one?"
                    )
                    raise ConfigError.of(launch.by, problem, "Their own output has the reason.")
                time.sleep(0.02)
