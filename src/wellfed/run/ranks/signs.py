"""Finds ranks that are gone without a report: their process has ended, or their machine gives no sign of life."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil

from wellfed.ranks import Launch
from wellfed.run.ranks.store import Member, RankStore

BEAT_S = 1.0
"""Seconds between two signs of life."""
GONE_S = 60.0
"""Seconds without a sign of life after which a rank on another machine is gone. A call in C that keeps Python's lock
also keeps the thread that gives them, for tens of seconds at worst."""
GONE_AFTER_FAILURE_S = 10.0
"""The same where a collective of torch has failed, which a lost rank would explain."""


class Signs:
    """Signs of life of the ranks that this one checks: rank 0 all others, the first rank of a machine those on it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.members: dict[int, Member] = {}
        """Ranks that have joined, where this rank checks any."""
        self._last: dict[int, tuple[bytes, float]] = {}
        """Sign of each rank on another machine, and when it changed by this process's clock."""
        self.limit_s = GONE_S

    def give(self, store: RankStore) -> None:
        """Gives a sign of life of this rank."""
        store.call("set", f"beat/{self._launch.rank}", str(time.monotonic()))

    def find_members(self, store: RankStore) -> None:
        """Looks for ranks that have joined since the last call."""
        for rank in range(self._launch.world_size):
            if rank not in self.members and (member := store.member(rank)) is not None:
                self.members[rank] = member

    def gone(self, store: RankStore, ended: Collection[int]) -> list[int]:
        """Returns the ranks that are gone, apart from those that have ended."""
        launch = self._launch
        if not launch.is_first_of_node:
            return []
        self.find_members(store)
        left = {rank: one for rank, one in self.members.items() if rank != launch.rank and rank not in ended}
        near = [rank for rank, one in left.items() if one.node == launch.node]
        found = [rank for rank in near if not _is_alive(left[rank].pid)]
        far = sorted(left.keys() - set(near)) if launch.rank == 0 else []
        signs = store.call("multi_get", [f"beat/{rank}" for rank in far]) if far else []
        now_s = time.monotonic()
        for rank, sign in zip(far, signs, strict=True):
            if rank not in self._last or self._last[rank][0] != sign:
                self._last[rank] = sign, now_s
            elif now_s - self._last[rank][1] > self.limit_s:
                found.append(rank)
        return found

    def named(self, *ranks: int) -> str:
        """Returns ranks with their machines, for messages; eight at most."""
        shown = []
        for rank in ranks[:8]:
            member = self.members.get(rank)
            is_placed = member is not None and self._launch.num_nodes > 1
            shown.append(f"{rank} on node {member.node} ({member.host})" if member and is_placed else str(rank))
        return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # of another user, say
        return True
