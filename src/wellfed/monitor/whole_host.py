"""Reads what all processes together take of the host: CPU time and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

from wellfed.observe.telemetry.host import HostSource
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.series import Reading
from wellfed.units import gib


class WholeHostSource:
    """``cpu_pct`` of everybody (100 = one core), ``mem_used_gib`` of the host's memory and ``iowait_pct``."""

    name = "host"
    waits_for_step_end = False

    def __init__(self, *, host: HostSource | None = None, memory: Callable[[], Any] = psutil.virtual_memory) -> None:
        """
        Args:
            host: what one process takes, and what the others do; None = this process.
            memory: ``total`` and ``available`` of the host, in bytes.
        """
        self._host, self._memory = host or HostSource(), memory

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """One reading, of the host; none at an edge."""
        if edge:
            return []
        memory = self._memory()
        values = {"mem_used_gib": gib(memory.total - memory.available)}
        for reading in self._host.read(slow=slow):
            if (others_pct := reading.values.get("others_cpu_pct")) is not None:
                values["cpu_pct"] = reading.values["cpu_pct"] + others_pct
            if (iowait_pct := reading.values.get("iowait_pct")) is not None:
                values["iowait_pct"] = iowait_pct
        return [Reading(HOST, values)]

    def close(self) -> None:
        """Nothing is held."""
