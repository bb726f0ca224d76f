"""Reads the CPU and memory limits of a container or job scheduler, as cgroup v2 has them.

Files: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max, memory.max, memory.high, memory.current).
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
        fields = _text(folder / "cpu.max").split()  # "150000 100000" or "max 100000"
        quota, period = (_as_int(fields[0]), _as_int(fields[1])) if len(fields) == 2 else (None, None)
        if quota and period:
            cores.append(quota / period)
        # Above memory.high the kernel throttles, so a process crawls before it reaches memory.max.
        found = [_as_int(_text(folder / name)) for name in ("memory.max", "memory.high")]
        if (limit := min((number for number in found if number is not None), default=None)) is not None:
            limits.append(limit)
            rooms.append(max(0, limit - _unreclaimable(folder)))
    return CgroupLimits(min(cores, default=None), min(limits, default=None), min(rooms, default=None))


def _folders(root: Path) -> Iterator[Path]:
    """Yields every folder whose limits bind this process, deepest first."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        # In a container the path may be the host's and not exist here. Then the mount itself is our group.
        path = Path(group)
        parts = () if ".." in path.parts else path.parts[1:]
        folders = (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
        yield from (folder for folder in folders if not controllers and folder.is_dir())  # v2 lists no controllers


def _unreclaimable(folder: Path) -> int:
    stat = dict(fields[:2] for line in _text(folder / "memory.stat").splitlines() if len(fields := line.split()) >= 2)
    used, cache = _as_int(_text(folder / "memory.current")), _as_int(stat.get("inactive_file", ""))
    return max(0, (used or 0) - (cache or 0))


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
