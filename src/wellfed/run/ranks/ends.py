"""Reports how each rank ends, and ends a rank that hangs because another one has failed.

In each rank a daemon thread gives a sign of life once a second, reads which ranks have ended, and looks for ranks that
are gone. One on the same machine is found within 2 s, one on another machine within `signs.GONE_S`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from wellfed.errors import EXIT_FAILED
from wellfed.ranks import Launch
from wellfed.run.ending import Outcome, RankEnded
from wellfed.run.ranks.signs import BEAT_S, GONE_AFTER_FAILURE_S, Signs
from wellfed.run.ranks.store import RankStore, StoreGone

GRACE_S = 6.0
"""Seconds in which a rank ends by itself once another has failed. Then it is ended: its collective may hang."""
LAST_RECORD_S = 5.0
"""Seconds that rank 0 then has to write the record."""
_REPORT_S = 5.0
"""Seconds that an error of unknown cause waits for another rank's report, which may explain it."""
LEAVE_S = 5.0
"""Seconds that a rank which ends waits at most until its outcome was read."""
_OUTCOMES = "ends"


class Ends:
    """How the ranks of a run have ended, as far as this one has read or found."""

    def __init__(self, launch: Launch) -> None:
        self.lost: set[int] = set()
        """Ranks that are gone without a report."""
        self.on_rank_0_gone: Callable[[Outcome], None] = lambda outcome: None
        """Called once, in whichever thread finds that rank 0 is gone without a report."""
        self.signs = Signs(launch)
        self._launch = launch
        self._store: RankStore | None = None
        self._known: dict[int, Outcome] = {}
        self._noting = threading.Lock()
        self._is_over = threading.Event()
        self._on_failure: Callable[[Outcome], None] | None = None
        self._forcing: threading.Timer | None = None

    def start(self, store: RankStore) -> None:
        """Gives signs of life and reads the ends of others from now on."""
        self._store = store
        threading.Thread(target=self._beat, args=[store], name="wellfed-ranks", daemon=True).start()

    def report(self, outcome: Outcome) -> None:
        """Reports how this rank ends; only the first report counts."""
        if self._store is not None and self._note(self._launch.rank, outcome):
            with suppress(RankEnded), self.gone_with_store():
                self._send(self._store, self._launch.rank, outcome)

    def check(self, rank: int) -> None:
        """Raises RankEnded if a rank has failed, or if this one has ended."""
        failure = self.failure()
        if failure is not None or rank in self._known:
            raise RankEnded(failure or self._known[rank])

    def failure(self) -> Outcome | None:
        """Returns the failure of another rank that explains most: not caused by another rank, not by a signal."""
        bad = [one for rank, one in [*self._known.items()] if one.exit_code and rank != self._launch.rank]
        return min(bad, key=lambda one: (one.is_of_other_rank, one.status == "interrupted"), default=None)

    def reason(self, outcome: Outcome) -> Outcome | None:
        """Returns how another rank failed, which may be why this one can't go on.

        Waits until a rank reports that it failed by itself, or all others have ended or are gone.

        Args:
            outcome: this rank's own. Where all ranks stop together none is waited for.
        """
        if self._store is None:
            return None
        self.signs.limit_s = GONE_AFTER_FAILURE_S
        has_lost_one = outcome.is_of_other_rank or outcome.status == "interrupted"
        wait_s = GONE_AFTER_FAILURE_S + 3 * BEAT_S if has_lost_one else _REPORT_S
        until_s = time.monotonic() + (0.0 if outcome.is_of_all else wait_s)
        while True:
            with suppress(RankEnded), self.gone_with_store():
                self._read(self._store)
            found = self.failure()
            if found is not None and not found.is_of_other_rank and found.status != "interrupted":
                return found
            missing = [rank for rank in range(self._launch.world_size) if rank not in self._known]
            missing = [rank for rank in missing if rank != self._launch.rank]
            if not missing or time.monotonic() > until_s:
                break
            time.sleep(BEAT_S / 5)
        if found is not None and not found.is_of_other_rank:
            return found
        if not missing or not outcome.is_of_other_rank:
            return None
        message = f"{self.signs.named(*missing)} did not answer, though alive: a hang, or a broken connection."
        return Outcome("failed", EXIT_FAILED, "code", message)

    @contextmanager
    def watching(self, on_failure: Callable[[Outcome], None]) -> Iterator[None]:
        """Within the block the failure of another rank ends this one too, by force after `GRACE_S`.

        Args:
            on_failure: writes the record; called in another thread before the process is ended.
        """
        self._on_failure = on_failure
        failure = self.failure()
        if failure is not None:
            self._force_later(failure)
        try:
            yield
        finally:
            self._on_failure = None
            if self._forcing is not None:
                self._forcing.cancel()

    def stop(self) -> None:
        """Waits until the ranks that have to read this rank's outcome have done so, for some seconds at most."""
        with suppress(StoreGone):
            if self._store is not None:
                self._wait_until_read(self._store)
        self._is_over.set()

    @contextmanager
    def gone_with_store(self) -> Iterator[None]:
        """Turns the loss of the store into the end of rank 0, which serves it.

        Raises:
            RankEnded: instead of StoreGone.
        """
        try:
            yield
        except StoreGone as error:
            gone = self._gone(0)
            if not self._is_over.is_set() and self._note(0, gone):
                self.lost.add(0)
                self.on_rank_0_gone(gone)
            raise RankEnded(self.failure() or self._known.get(0, gone)) from error

    def _beat(self, store: RankStore) -> None:
        with suppress(RankEnded):
            while not self._is_over.wait(BEAT_S) and 0 not in self._known:  # whose end is that of the store
                with self.gone_with_store():
                    self.signs.give(store)
                    self._read(store)
                    if found := self.signs.gone(store, self._known):
                        self._read(store)  # they may have ended meanwhile
                    for rank in found:
                        outcome = self._gone(rank)
                        if self._note(rank, outcome):
                            self.lost.add(rank)
                            self._send(store, rank, outcome)

    def _read(self, store: RankStore) -> None:
        for entry in filter(None, store.call("get", _OUTCOMES).decode().split("\n")):
            rank, fields = json.loads(entry)
            outcome = Outcome(**fields)
            if rank in self._known:
                continue
            if outcome.exit_code and rank not in self.signs.members and self._launch.is_first_of_node:
                self.signs.find_members(store)
            self._note(rank, self._placed(rank, outcome))
            if rank == 0:
                store.call("set", _has_read(self._launch.rank), "1")

    def _note(self, rank: int, outcome: Outcome) -> bool:
        """Returns whether this is the first that is known of the rank's end."""
        with self._noting:
            if rank in self._known:
                return False
            self._known[rank] = outcome
        if outcome.exit_code and rank != self._launch.rank:
            self._force_later(outcome)
        return True

    def _send(self, store: RankStore, rank: int, outcome: Outcome) -> None:
        store.call("append", _OUTCOMES, json.dumps([rank, asdict(outcome)]) + "\n")

    def _gone(self, rank: int) -> Outcome:
        message = f"{self.signs.named(rank)} is gone without a word: it was killed, or its machine is gone."
        return Outcome("failed", EXIT_FAILED, "code", message)

    def _placed(self, rank: int, outcome: Outcome) -> Outcome:
        """Returns an outcome whose message names the rank and its machine."""
        if outcome.exit_code == 0 or outcome.message.startswith("Rank "):
            return outcome
        return replace(outcome, message=f"{self.signs.named(rank)}: {outcome.message}")

    def _force_later(self, outcome: Outcome) -> None:
        if outcome.is_of_all or self._on_failure is None or self._forcing is not None:
            return  # where all stop together, rank 0 may write its checkpoint for long
        self._forcing = threading.Timer(GRACE_S, self._force, [outcome])
        self._forcing.daemon = True
        self._forcing.start()

    def _force(self, outcome: Outcome) -> None:
        on_failure = self._on_failure
        if on_failure is None:
            return
        outcome = self.failure() or outcome
        self.report(replace(outcome, is_of_other_rank=True))  # the others must not wait for the record
        recording = threading.Thread(target=on_failure, args=[outcome], daemon=True)
        recording.start()
        recording.join(LAST_RECORD_S)
        os._exit(outcome.exit_code or EXIT_FAILED)

    def _wait_until_read(self, store: RankStore) -> None:
        own, now_s = self._launch.rank, time.monotonic()
        if own == 0:  # it serves the store
            left = [rank for rank in self.signs.members if rank > 0]
            while left and time.monotonic() < now_s + LEAVE_S:
                self._read(store)
                left = [rank for rank in left if rank not in self._known and not store.has(_has_read(rank))]
                time.sleep(BEAT_S / 20)
        elif self._launch.by == "Lightning" and self._known[own].exit_code:
            # Lightning kills rank 0 within 5 s of the end of a failed rank: it must have written the record before.
            while time.monotonic() < now_s + GRACE_S + LAST_RECORD_S + 2 * BEAT_S:
                store.has(_OUTCOMES)  # until the store is gone
                time.sleep(BEAT_S / 5)


def _has_read(rank: int) -> str:
    """Key under which a rank notes that it knows how rank 0 has ended."""
    return f"has read/{rank}"
