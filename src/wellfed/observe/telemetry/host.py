"""Reads CPU time and memory of this process and its children, the CPU time of all others, and the memory left."""

from __future__ import annotations

import multiprocessing.process
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import psutil

from wellfed.observe.hardware.cgroup import cgroup_limits
from wellfed.observe.hardware.detect import available_gib
from wellfed.observe.telemetry.series import HOST, Reading, Source
from wellfed.units import gib

SHORTEST_S = 0.05
"""Minimum seconds between readings of CPU time, which is counted in ticks of 10 ms."""
SEARCH_SHARE = 0.0003
"""Share of time for the search for new processes, which takes tens of milliseconds with many processes. Data workers
need no search."""


class _Machine(NamedTuple):
    """CPU seconds of all CPUs of the machine since it started, for any process."""

    busy: float
    total: float
    iowait: float | None
    """Idle for a disk; None if the system does not count it."""


def _machine_of(times: Any) -> _Machine:
    """Returns the sums of psutil's ``cpu_times()``."""
    seconds = times._asdict()
    busy_s = sum(seconds.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    # Time of virtual machines is already part of user time.
    total_s = sum(each for name, each in seconds.items() if not name.startswith("guest"))
    return _Machine(busy_s, total_s, seconds.get("iowait"))


def spent_cpu_s() -> float:
    """Returns the CPU seconds of this process, of its data workers, and of its children that have ended.

    Other ranks that Lightning has started from here are children too. They count their own.
    """
    spent_s = 0.0
    for pid in (os.getpid(), *_started()):
        with suppress(psutil.Error):
            spent_s += _cpu_s(psutil.Process(pid))
    return spent_s


def _cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and its ended children."""
    times = process.cpu_times()
    names = ("user", "system", "children_user", "children_system")
    return sum(getattr(times, name, 0.0) for name in names)


def peak_rss_bytes() -> float:
    """Returns the peak of this process's resident memory; the current size where the system does not count it."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().rss)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)  # macOS counts in bytes


_FUTEX = {"x86_64": b"202", "aarch64": b"98"}.get(platform.machine()) if sys.platform == "linux" else None
"""Number of the system call in which a thread waits for a lock; None = unknown."""
_PRIVATE = 128
"""Flag of that call if only threads of one process share the lock (futex(2))."""
_WORKER = b"pt_data_worker"
"""Name that torch gives to the worker processes of its DataLoader."""


def _waits_for_shared_lock(pid: int) -> bool | None:
    """Returns whether a worker of a DataLoader waits for a lock that processes share; None for another process.

    Idle processes of a pool wait for such a lock, too.
    """
    with open(f"/proc/{pid}/comm", "rb", buffering=0) as file:
        if file.read().strip() != _WORKER:
            return None
    with open(f"/proc/{pid}/syscall", "rb", buffering=0) as file:
        call = file.read().split()  # its number and arguments, or "running"
    if len(call) < 3 or call[0] != _FUTEX or int(call[2], 16) & _PRIVATE:
        return False
    return _is_shared(pid, int(call[1], 16))


@lru_cache(maxsize=64)
def _is_shared(pid: int, address: int) -> bool:
    """Returns whether processes share this memory. C++ libraries wait for threads of their own without the flag."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            range_, flags = line.split(maxsplit=2)[:2]
            begin, end = (int(each, 16) for each in range_.split("-"))
            if begin <= address < end:
                return flags.endswith("s")
    return False


def _started() -> set[int]:
    """Returns ids of processes that multiprocessing has started here and not yet joined."""
    return {one.pid for one in tuple(getattr(multiprocessing.process, "_children", ())) if one.pid is not None}


class HostSource(Source):
    """Source of CPU time and resident memory by psutil. New data workers and ended processes are noticed at once."""

    name = "host"

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        process: psutil.Process | None = None,
        machine: Callable[[], Any] = psutil.cpu_times,
    ) -> None:
        """
        Args:
            process: process to read, with its children; None = this one.
            machine: returns CPU seconds of the machine since it started.
        """
        self._now_s, self._own, self._machine = now_s, process or psutil.Process(os.getpid()), machine
        self._before: tuple[float, Mapping[int, float], _Machine] | None = None
        """Time, CPU seconds of each process, and of the machine at the last reading."""
        self._children: list[psutil.Process] = []
        self._loaders: set[int] = set()
        self._search_at_s = now_s()

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """Returns one reading of the host; none at an edge, or if no process may be read."""
        if edge:
            return []
        now_s = self._now_s()
        self._find_children(now_s)
        cpu_s, rss_bytes = {}, 0
        for process in (self._own, *self._children):
            with suppress(psutil.Error), process.oneshot():  # ended, or is not ours to look at
                cpu_s[process.pid] = _cpu_s(process)
                rss_bytes += process.memory_info().rss
        if not cpu_s:
            return []
        available = {"ram_available_gib": available_gib(cgroup_limits())} if slow else {}
        return [Reading(HOST, {"rss_gib": gib(rss_bytes), **self._spent_since(now_s, cpu_s), **available})]

    def _find_children(self, now_s: float) -> None:
        """Searches for child processes if a search is due; adds new data workers in any case."""
        if now_s >= self._search_at_s:
            began_s = time.perf_counter()
            try:
                self._children = self._own.children(recursive=True)
            except psutil.Error:
                self._children = []
            self._search_at_s = self._now_s() + (time.perf_counter() - began_s) / SEARCH_SHARE
        self._loaders = _started() if self._own.pid == os.getpid() else set()
        for pid in self._loaders - {child.pid for child in self._children}:
            with suppress(psutil.Error):
                self._children.append(psutil.Process(pid))

    def _spent_since(self, now_s: float, cpu_s: Mapping[int, float]) -> dict[str, float]:
        """Returns the use of CPUs since the last call; empty if that was a moment ago, or never.

        Args:
            cpu_s: CPU seconds so far of each process of the run, and of its ended children.
        """
        before = self._before
        if before is not None and now_s - before[0] < SHORTEST_S:
            return {}
        self._before = (now_s, cpu_s, machine := _machine_of(self._machine()))
        if before is None:
            return {}
        then_s, then_cpu_s, then = before
        # A data worker that is new has started since. Other processes that are new may have run for long.
        known_s = {**cpu_s, **dict.fromkeys(self._loaders, 0.0), **then_cpu_s}
        new_s = sum(known_s[pid] for pid in cpu_s.keys() - then_cpu_s.keys())
        # The time of a process that ends goes over to its parent, so it stays in the sum.
        own_s = max(0.0, sum(cpu_s.values()) - new_s - sum(then_cpu_s.values()))
        of_a_core, values = 100 / (now_s - then_s), self._locked()
        values["loader_cpu_pct"] = of_a_core * sum(cpu_s[pid] - known_s[pid] for pid in self._loaders & cpu_s.keys())
        if (passed_s := machine.total - then.total) > 0:  # otherwise the system gives no counts
            busy_s = max(0.0, machine.busy - then.busy)
            own_s = min(own_s, busy_s)
            values["others_cpu_pct"] = of_a_core * (busy_s - own_s)
            if machine.iowait is not None and then.iowait is not None:
                values["iowait_pct"] = 100 * max(0.0, machine.iowait - then.iowait) / passed_s
        return {"cpu_pct": of_a_core * own_s, **values}

    def _locked(self) -> dict[str, float]:
        """Returns the DataLoader workers that wait for a shared lock, 100 = one worker; empty if that is unknown."""
        waiting = []
        for pid in self._loaders:
            with suppress(OSError):  # ended, or is not ours to look at
                if (waits := _waits_for_shared_lock(pid)) is not None:
                    waiting.append(waits)
        is_known = _FUTEX is not None and (waiting or not self._loaders)
        return {"loader_lock_pct": 100.0 * sum(waiting)} if is_known else {}


class WholeHostSource(HostSource):
    """Source of ``cpu_pct`` of all processes (100 = one core), ``mem_used_gib`` of the host and ``iowait_pct``."""

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """Returns one reading of the host; none at an edge."""
        if edge:
            return []
        memory = psutil.virtual_memory()
        values = {"mem_used_gib": gib(memory.total - memory.available)}
        spent = self._spent_since(self._now_s(), {})  # without processes of a run, all are others
        names = {"cpu_pct": "others_cpu_pct", "iowait_pct": "iowait_pct"}
        values |= {name: spent[of_others] for name, of_others in names.items() if of_others in spent}
        return [Reading(HOST, values)]
