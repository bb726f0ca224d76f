"""Reads what this process and those it started take of the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

from wellfed.telemetry.metrics import HOST
from wellfed.telemetry.series import Reading
from wellfed.units import gib

SHORTEST_S = 0.05
"""CPU time is counted in ticks of 10 ms: over less than this it says nothing."""
SEARCH_SHARE = 0.001
"""Share of time that may go into looking for new processes; where many run, looking takes tens of milliseconds."""


class HostSource:
    """CPU time and resident memory by psutil; processes that come and go are noticed within seconds."""

    name = "host"
    waits_for_step_end = False

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic, process: psutil.Process | None = None) -> None:
        """``process``: whose figures; None = this one's."""
        self._now_s, self._own = now_s, process or psutil.Process(os.getpid())
        self._cpu_s: dict[int, float] = {}
        self._read_at_s: float | None = None
        self._children: list[psutil.Process] = []
        self._search_at_s = now_s()

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """One reading, of the host; none at an edge, or where nothing may be looked at."""
        if edge:
            return []
        now_s = self._now_s()
        if now_s >= self._search_at_s:
            self._search()
        cpu_s, rss_bytes = {}, 0
        for process in (self._own, *self._children):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss_bytes += process.memory_info().rss
            except psutil.Error:  # ended, or is not ours to look at
                continue
            cpu_s[process.pid] = times.user + times.system
        if not cpu_s:
            return []
        values = {"rss_gib": gib(rss_bytes)}
        if self._read_at_s is None or now_s - self._read_at_s >= SHORTEST_S:
            if self._read_at_s is not None:
                # One that was not there before counts from now on: what it did earlier belongs to no interval.
                spent_s = sum(max(0.0, total - self._cpu_s.get(pid, total)) for pid, total in cpu_s.items())
                values["cpu_pct"] = 100 * spent_s / (now_s - self._read_at_s)
            self._cpu_s, self._read_at_s = cpu_s, now_s
        return [Reading(HOST, values)]

    def close(self) -> None:
        """Nothing is held."""

    def _search(self) -> None:
        began_s = time.perf_counter()
        try:
            self._children = self._own.children(recursive=True)
        except psutil.Error:
            self._children = []
        self._search_at_s = self._now_s() + (time.perf_counter() - began_s) / SEARCH_SHARE
