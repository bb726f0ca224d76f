"""Reports how each rank ends, and ends a rank that hangs because another one has failed.

In each rank a daemon thread reads once a second which ranks have ended, and checks the processes of the other ranks on
its machine. A missing rank of another machine is found when a collective of torch fails, or after `GONE_S` without a
heartbeat at rank 0.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from wellfed.errors import EXIT_FAILED
from wellfed.ranks import Launch
from wellfed.run.outcome import Outcome, RankEnded

BEAT_S = 1.0
"""Seconds between two heartbeats."""
GONE_S = 60.0
"""Seconds without a heartbeat after which a rank of another machine is gone. A C call that holds Python's lock also
stops the heartbeat thread, for tens of seconds at worst."""
GRACE_S = 6.0
"""Seconds that a rank has to end once another has failed. Then it is killed, since its collective may hang."""
LAST_RECORD_S = 5.0
"""Seconds that rank 0 then has to write the record."""
REPORT_S = 10.0
"""Seconds that rank 0 waits for the reports of others after a collective has failed. A rank without one is gone."""
_ENDS = "ends"


class Joined(NamedTuple):
    """Process and machine of a rank that has joined."""

    node: int
    host: str
    pid: int


class Members:
    """Ranks of a run that have joined, with their processes, machines and heartbeats.

    Args:
        ask: calls a method of the store.
    """

    def __init__(self, launch: Launch, ask: Callable[..., Any]) -> None:
        self._launch, self._ask = launch, ask
        self._found: dict[int, Joined] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        """Last heartbeat of ranks on other machines, and its arrival by this process's clock."""
        first = launch.rank - launch.local_rank
        self._near = set(range(first, first + launch.devices)) - {launch.rank}

    def join(self) -> None:
        """Adds this rank."""
        own = Joined(self._launch.node, socket.gethostname(), os.getpid())
        self._ask("set", f"beat/{self._launch.rank}", "")
        self._ask("set", f"member/{self._launch.rank}", json.dumps(own))
        self.missing({0, self._launch.rank})

    def missing(self, ranks: set[int]) -> list[int]:
        """Returns those of the ranks that have not joined yet."""
        for rank in ranks - self._found.keys():
            if self._ask("check", [f"member/{rank}"]):
                self._found[rank] = Joined(*json.loads(self._ask("get", f"member/{rank}")))
        return sorted(ranks - self._found.keys())

    def named(self, *ranks: int) -> str:
        """Returns ranks with their machines, for messages; eight at most."""
        shown = []
        for rank in ranks[:8]:
            member = self._found.get(rank) if self._launch.num_nodes > 1 else None
            shown.append(f"{rank} on node {member.node} ({member.host})" if member else str(rank))
        return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"

    def beat(self) -> None:
        """Leaves a heartbeat of this rank."""
        self._ask("set", f"beat/{self._launch.rank}", str(time.monotonic()))

    def gone(self, ended: Collection[int]) -> list[int]:
        """Returns ranks that have not ended and are gone: here without a process, elsewhere without a heartbeat."""
        self.missing(self._near)  # ranks that Lightning starts come later
        left = {rank: one for rank, one in self._found.items() if rank not in {self._launch.rank, *ended}}
        found = [rank for rank in self._near & left.keys() if not _is_alive(left[rank].pid)]
        return found + (self._silent([*left.keys() - self._near]) if self._launch.rank == 0 else [])

    def _silent(self, ranks: list[int]) -> list[int]:
        signs = self._ask("multi_get", [f"beat/{rank}" for rank in ranks]) if ranks else []
        now_s = time.monotonic()
        for rank, sign in zip(ranks, signs, strict=True):
            if rank not in self._beats or self._beats[rank][0] != sign:
                self._beats[rank] = sign, now_s
        return [rank for rank in ranks if now_s - self._beats[rank][1] > GONE_S]


class ForcedEnd:
    """Ends this process `GRACE_S` after another rank has failed, since its collective may hang.

    Args:
        report: reports the failure to the other ranks, and returns the outcome to end with.
    """

    def __init__(self, rank: int, report: Callable[[Outcome], Outcome]) -> None:
        self._rank, self._report = rank, report
        self._on_failure: Callable[[Outcome], None] | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def armed(self, on_failure: Callable[[Outcome], None], known: Callable[[], Outcome | None]) -> Iterator[None]:
        """Ends the process within the block; ``known`` returns a failure from before it."""
        self._on_failure = on_failure
        if (failure := known()) is not None:
            self.after(failure)
        try:
            yield
        finally:
            self._on_failure = None
            if self._timer is not None:
                self._timer.cancel()

    def after(self, outcome: Outcome) -> None:
        """Starts the time that is left after a failure, once. If all ranks stop together, there is no limit, since
        rank 0 may need long for its checkpoint."""
        if outcome.is_of_all or self._on_failure is None or self._timer is not None:
            return
        self._timer = threading.Timer(GRACE_S, self._end, [outcome])
        self._timer.daemon = True
        self._timer.start()

    def _end(self, outcome: Outcome) -> None:
        on_failure = self._on_failure
        if on_failure is None:
            return
        outcome = self._report(outcome)  # the others must not wait for the record
        recording = threading.Thread(target=on_failure, args=[outcome], daemon=True)
        recording.start()
        recording.join(LAST_RECORD_S)
        if self._rank == 0:
            time.sleep(2 * BEAT_S)  # time for the others to read it, since the store ends with this process
        os._exit(outcome.exit_code or EXIT_FAILED)


class RankOutcomes:
    """Outcomes of the ranks of a run, as far as this rank has read or found them."""

    def __init__(self, launch: Launch) -> None:
        self.lost: set[int] = set()
        """Ranks that are gone without a report."""
        self.on_rank_0_gone: Callable[[Outcome], None] = lambda outcome: None
        """Called once, in the thread that finds that rank 0 is gone without a report."""
        self.members = Members(launch, self.ask)
        self._launch = launch
        self._store: Any = None
        self._known: dict[int, Outcome] = {}
        self._noting = threading.Lock()
        self._is_over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="wellfed-ranks", daemon=True)
        self._forced = ForcedEnd(launch.rank, self._report_of_other)

    def start(self, store: Any) -> None:
        """Joins the other ranks at a store of torch."""
        self._store, rank = store, self._launch.rank
        if rank == 0:
            self.ask("set", _ENDS, "\n")
        self.members.join()
        if rank in self._known:
            self._send(rank, self._known[rank])
        self._watching.start()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the store.

        Raises:
            RankEnded: rank 0, which serves it, has ended or is gone.
        """
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            if not self._is_over.is_set() and self._note_gone(0):
                self.on_rank_0_gone(self._known[0])
            raise RankEnded(self.failure() or self._known.get(0) or self._gone(0)) from error

    @property
    def failed(self) -> list[int]:
        """Ranks that failed by themselves."""
        return [rank for rank, one in self._known.items() if one.exit_code and not one.is_of_other_rank]

    def report(self, outcome: Outcome) -> None:
        """Reports how this rank ends, once it has joined. Only the first report counts."""
        if self._note(self._launch.rank, outcome) and self._store is not None:
            with suppress(RankEnded):
                self._send(self._launch.rank, outcome)
                if outcome.exit_code:
                    self._read()  # appending gets no answer: only reading shows that the store is gone

    def _report_of_other(self, outcome: Outcome) -> Outcome:
        outcome = self.failure() or outcome
        self.report(replace(outcome, is_of_other_rank=True))
        return outcome

    def check(self, rank: int) -> None:
        """Raises RankEnded if any rank has failed, or this one has ended."""
        failure = self.failure()
        if failure is not None or rank in self._known:
            raise RankEnded(failure or self._known[rank])

    def failure(self) -> Outcome | None:
        """Returns the most informative failure of another rank: not caused by another rank, not by a signal."""
        bad = [one for rank, one in [*self._known.items()] if one.exit_code and rank != self._launch.rank]
        return min(bad, key=lambda one: (one.is_of_other_rank, one.status == "interrupted"), default=None)

    def reason(self, own: Outcome) -> Outcome | None:
        """Returns how another rank failed, if that explains why this one can't continue.

        Waits until a rank reports that it failed by itself, or all others have ended. If this rank has lost a
        connection, and all ranks but some report that too, those are gone.

        Args:
            own: outcome of this rank. If all ranks stop together, there is no wait.
        """
        if self._store is None:
            return None
        until_s = time.monotonic() + (0.0 if own.is_of_all else REPORT_S)
        while True:
            with suppress(RankEnded):
                self._read()
            found = self.failure()
            if found is not None and not found.is_of_other_rank and found.status != "interrupted":
                return found
            silent = [rank for rank in range(self._launch.world_size) if rank not in {*self._known, self._launch.rank}]
            if not silent or time.monotonic() > until_s:
                break
            time.sleep(BEAT_S / 5)
        if own.is_of_other_rank and silent:
            with suppress(RankEnded):
                self.members.missing(set(silent))
            for rank in silent:
                self._note_gone(rank)
            return self._gone(*silent)
        return None if found is None or found.is_of_other_rank else found

    def watching(self, on_failure: Callable[[Outcome], None]) -> AbstractContextManager[None]:
        """Ends this rank when another one fails within the block, by force after `GRACE_S`.

        Args:
            on_failure: writes the record; called in another thread before the process is ended.
        """
        return self._forced.armed(on_failure, self.failure)

    def stop(self) -> None:
        """Waits some seconds for the ranks that have to read this rank's outcome."""
        own, now_s = self._launch.rank, time.monotonic()
        with suppress(RankEnded):
            if self._store is not None and own == 0:  # it serves the store
                while len(self._known) < self._launch.world_size and time.monotonic() < now_s + 3 * BEAT_S:
                    self._read()
                    time.sleep(BEAT_S / 20)
            elif self._store is not None and self._launch.by == "Lightning" and self._known[own].exit_code:
                # Lightning kills rank 0 within 5 s of a failed rank's end, and the record must be written before.
                self._is_over.set()
                while time.monotonic() < now_s + GRACE_S + LAST_RECORD_S + 2 * BEAT_S:
                    self._read()  # until the store is gone
                    time.sleep(BEAT_S / 5)
        self._is_over.set()
        if self._watching.is_alive():
            self._watching.join(LAST_RECORD_S)  # it may write that rank 0 is gone

    def _watch(self) -> None:
        with suppress(RankEnded):
            while not self._is_over.wait(BEAT_S) and 0 not in self._known:  # the store ends with rank 0
                self.members.beat()
                self._read()
                found = self.members.gone(self._known)
                if found:
                    self._read()  # they may have reported meanwhile
                for rank in found:
                    if self._note_gone(rank):
                        self._send(rank, self._known[rank])

    def _read(self) -> None:
        for entry in filter(None, self.ask("get", _ENDS).decode().split("\n")):
            rank, fields = json.loads(entry)
            if rank in self._known:
                continue
            outcome = Outcome(**fields)
            if outcome.exit_code and not outcome.message.startswith("Rank "):
                self.members.missing({rank})
                outcome = replace(outcome, message=f"{self.members.named(rank)}: {outcome.message}")
            self._note(rank, outcome)

    def _note(self, rank: int, outcome: Outcome) -> bool:
        """Returns whether this is the first report of the rank's end."""
        with self._noting:
            if rank in self._known:
                return False
            self._known[rank] = outcome
        if outcome.exit_code and rank != self._launch.rank:
            self._forced.after(outcome)
        return True

    def _note_gone(self, rank: int) -> bool:
        is_first = self._note(rank, self._gone(rank))
        if is_first:
            self.lost.add(rank)
        return is_first

    def _send(self, rank: int, outcome: Outcome) -> None:
        self.ask("append", _ENDS, json.dumps([rank, asdict(outcome)]) + "\n")

    def _gone(self, *ranks: int) -> Outcome:
        verb = "is" if len(ranks) == 1 else "are"
        message = f"{self.members.named(*ranks)} {verb} gone without a report: it was killed, or its machine is gone."
        return Outcome("failed", EXIT_FAILED, "code", message)


def _is_alive(pid: int) -> bool:
    import psutil  # a run of one rank starts without it

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # e.g. of another user
        return True
