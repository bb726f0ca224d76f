"""Exchanges plain objects between the ranks of one run, through a store of torch that rank 0 serves.

Works before torch's collectives exist, as while data are prepared. Each rank reports how it ends. A rank that is killed
reports nothing: its launcher ends the others, and torch's collectives fail.
"""

from __future__ import annotations

import json
import math
import pickle
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from wellfed.errors import EXIT_FAILED, ConfigError
from wellfed.ranks import Launch
from wellfed.run.outcome import OK, Outcome, RankEnded
from wellfed.run.ranks import store as stores
from wellfed.run.ranks.store import Address

COME_S = 300.0
"""Seconds that ranks wait for one another at the start. Each imports torch first, maybe from a slow disk."""
REFUSED_S = 60.0
"""Seconds that rank 0 waits for the others if it only has to report that nothing is run."""
REPORT_S = 5.0
"""Seconds to wait for the report of another rank after a collective has failed."""
_LIGHTNING_REPORT_S = 1.0
"""The same for ranks that Lightning has started. It kills rank 0 within 5 s of a killed rank's end."""
_LAST_RECORD_S = 30.0
"""Seconds that a failed rank leaves rank 0 to write its record, before the launcher ends it."""
_READ_S = 3.0
"""Seconds that rank 0 serves the store after its end, until the others have ended."""
_ENDS = "ends"


class Exchange:
    """One rank's end of the exchange. It is opened at its first use, which imports torch.

    Every method raises a RankEnded if rank 0 is gone. Those that wait for another rank also do so if a rank has failed,
    or if the awaited one has ended, and on rank 0 a ConfigError if ranks have not come within `COME_S`. Each kind of
    object is exchanged once.

    Args:
        address: address of the store if another process passed it on; None = find it through the launcher.
    """

    def __init__(self, launch: Launch, address: Address | None = None) -> None:
        self.launch = launch
        self._given = address
        self._store: Any = None
        self._launchers: Any = None
        self._is_closed = False
        self._ends: dict[int, Outcome] = {}
        self._come_until_s = math.inf
        """Time until which all ranks must have come, on rank 0, until they have."""

    @property
    def port(self) -> int:
        """Port at which another process on this machine joins."""
        self._open()
        return int(self._store.port)

    def broadcast(self, kind: str, content: Any = None) -> Any:
        """Returns rank 0's object on all ranks."""
        if self.launch.rank > 0:
            return self._await(kind, 0)
        self._put(kind, content)
        return content

    def gather(self, kind: str, own: Any) -> list[Any]:
        """Returns the objects of all ranks, in their order, on rank 0. Other ranks get an empty list and don't wait."""
        rank = self.launch.rank
        self._put(f"{kind}/{rank}", own)
        return [] if rank else [self._await(f"{kind}/{each}", each) for each in range(self.launch.world_size)]

    def meet(self, where: str) -> None:
        """Waits until all ranks have come there."""
        self.broadcast(f"all at {where}", self.gather(where, None))

    def publish(self, kind: str, content: Any) -> None:
        """Leaves an object for `latest`, in place of the previous one of this rank. Does not wait for another rank."""
        self._put(f"latest {kind}/{self.launch.rank}", content)

    def latest(self, kind: str) -> list[Any]:
        """Returns, on rank 0, the latest object of each rank that has left one, in the order of ranks; [] on others.
        Objects of ranks that have ended stay. Does not wait for another rank."""
        if self.launch.rank > 0:
            return []
        self._open()
        keys = [f"latest {kind}/{rank}" for rank in range(self.launch.world_size)]
        return [pickle.loads(self._ask("get", key)) for key in keys if self._ask("check", [key])]

    def report(self, outcome: Outcome) -> None:
        """Reports how this rank ends, if the exchange is open. Only the first report counts."""
        launch = self.launch
        if self._store is None or launch.rank in self._ends:
            return
        self._ends[launch.rank] = outcome
        if outcome.exit_code and not outcome.message.startswith("Rank "):  # as other ranks show it
            host = f" on node {launch.node} ({socket.gethostname()})" if launch.num_nodes > 1 else ""
            outcome = replace(outcome, message=f"Rank {launch.rank}{host}: {outcome.message}")
        with suppress(RankEnded):
            self._ask("append", _ENDS, f"{json.dumps([launch.rank, asdict(outcome)])}\n")

    def reason(self) -> Outcome | None:
        """Returns how another rank failed by itself. Waits up to `REPORT_S` for its report."""
        until_s = time.monotonic() + (_LIGHTNING_REPORT_S if self.launch.by == "Lightning" else REPORT_S)
        with suppress(RankEnded):
            while self._store is not None:
                found = self._failure()
                if found is not None and not found.is_of_other_rank and found.status != "interrupted":
                    return found
                if len(self._ends) >= self.launch.world_size - 1 or time.monotonic() > until_s:
                    break
                time.sleep(0.1)
        return None

    def close(self, outcome: Outcome = OK) -> None:
        """Reports the end of this rank, and waits until it was read, for `REFUSED_S` at most. Ranks that join late read
        it too."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + (REFUSED_S if self._store is None else _READ_S)
        with suppress(ConfigError, OSError, RuntimeError, RankEnded):
            if self.launch.rank == 0 or self._given is not None:
                self._open()
        self.report(outcome)
        if self._store is None:
            return
        with suppress(RankEnded):
            if self.launch.rank == 0:
                while len(self._ends) < self.launch.world_size and time.monotonic() < until_s:
                    self._read_ends()
                    time.sleep(0.05)
            elif self._given is not None and self._ends[self.launch.rank].exit_code:
                # Lightning kills rank 0 within 5 s of a failed rank's end, and the record must be written before.
                while time.monotonic() < until_s + _LAST_RECORD_S:
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
            self._ends.setdefault(rank, Outcome(**fields))

    def _failure(self) -> Outcome | None:
        """Returns the most informative failure that another rank has reported: not caused by another rank or a
        signal."""
        self._read_ends()
        bad = [one for rank, one in self._ends.items() if one.exit_code and rank != self.launch.rank]
        return min(bad, key=lambda one: (one.is_of_other_rank, one.status == "interrupted"), default=None)

    def _put(self, key: str, content: Any) -> None:
        self._open()
        self._ask("set", key, pickle.dumps(content))

    def _await(self, key: str, rank: int) -> Any:
        """Returns an object of a rank, once it is there. Raises RankEnded if that rank has ended or any has failed."""
        self._open()
        wait_s = 0.005
        while not self._ask("check", [key]):
            failure = self._failure() or self._ends.get(rank) or self._ends.get(self.launch.rank)
            if failure is not None:
                raise RankEnded(failure)
            if time.monotonic() > self._come_until_s:
                self._check_all_came()
            time.sleep(wait_s)
            wait_s = min(0.2, 1.5 * wait_s)
        return pickle.loads(self._ask("get", key))

    def _check_all_came(self) -> None:
        launch, self._come_until_s = self.launch, math.inf
        missing = [str(rank) for rank in range(1, launch.world_size) if not self._ask("check", [f"came/{rank}"])]
        if missing:
            named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:8])}"
            problem = f"{named} of {launch.world_size} did not come within {COME_S:.0f} s."
            way_out = "Were they started, and do their machines reach this one? Their own output has the reason."
            raise ConfigError.of(launch.by, problem, way_out)

    def _open(self) -> None:
        """Opens the store at the first call."""
        if self._store is not None:
            return
        launch = self.launch
        if launch.rank > 0:
            self._store = stores.find(launch, COME_S) if self._given is None else stores.connect(self._given)
            self._ask("set", f"came/{launch.rank}", "")
            return
        self._store = stores.serve()
        self._ask("set", _ENDS, "\n")
        if launch.by != "Lightning":
            self._launchers = stores.publish(self._store.port, launch, COME_S)
            self._come_until_s = time.monotonic() + COME_S
