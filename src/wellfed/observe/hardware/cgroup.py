"""Reads the CPU and memory limits of a container or job scheduler: cgroup v1, v2, or both mounted together.

Files: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max, memory.max, memory.high, memory.current) and
https://docs.kernel.org/scheduler/sched-bwc.html (cpu.cfs_quota_us).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CgroupLimits:
    """Tightest limits over this process's group and all groups above it. None = unlimited, or no cgroups."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    memory_room_bytes: int | None = None
    """Bytes that may still be allocated: limit minus usage. Cache that the kernel can drop counts as free."""


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Returns the limits on this process. ``root`` holds proc/self/cgroup and sys/fs/cgroup."""
    cores: list[float] = []
    limits: list[int] = []
    rooms: list[int] = []
    for folder in _folders(root):
        if (quota := _cpu_cores(folder)) is not None:
            cores.append(quota)
        # Above memory.high the kernel throttles, so a process crawls before it reaches memory.max.
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        found = [number for name in names if (number := _number(folder / name)) is not None]
        if (limit := min(found, default=None)) is not None:
            limits.append(limit)
            rooms.append(max(0, limit - _unreclaimable(folder)))
    return CgroupLimits(min(cores, default=None), min(limits, default=None), min(rooms, default=None))


def _folders(root: Path) -> Iterator[Path]:
    """Yields every folder whose limits bind this process, deepest first within a hierarchy."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        # v2 lists no controllers. It is mounted at the top, or in unified/ beside v1.
        # v1 is mounted by its controllers, together (cpu,cpuacct) or one by one.
        names = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        # In a container the path may be the host's and not exist here. Then the mount itself is our group.
        parts = () if ".." in Path(path).parts else Path(path.lstrip("/")).parts
        folders = (mount.joinpath(name, *parts[:depth]) for name in names for depth in range(len(parts), -1, -1))
        yield from (folder for folder in folders if folder.is_dir())


def _cpu_cores(folder: Path) -> float | None:
    fields = _text(folder / "cpu.max").split()  # "150000 100000" or "max 100000"
    if len(fields) == 2:
        quota, period = _as_int(fields[0]), _as_int(fields[1])
    else:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    # v1 writes -1 for unlimited
    return quota / period if quota and period and quota > 0 and period > 0 else None


def _unreclaimable(folder: Path) -> int:
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(fields[:2] for line in _text(folder / "memory.stat").splitlines() if len(fields := line.split()) >= 2)
    # In v1, inactive_file covers the group alone. total_inactive_file covers the subtree, as usage does.
    cache = _as_int(stat.get("total_inactive_file", stat.get("inactive_file", ""))) or 0
    return max(0, used - cache)


def _number(path: Path) -> int | None:
    return _as_int(_text(path))


def _as_int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None  # "max", or no such file


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # no cgroups, or not readable: no limit is known
