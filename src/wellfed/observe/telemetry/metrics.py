"""Lists every published figure by its name in telemetry.csv and wandb. docs/telemetry.md explains each figure."""

from __future__ import annotations

from functools import cache

from wellfed.observe.telemetry.series import HOST

SLOW_S = 5.0
"""Seconds between readings of metrics that change slowly or are expensive. At least telemetry.interval_s."""
GPU_METRICS = (
    *("util_pct", "mem_util_pct", "mem_used_gib"),
    *("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct", "pcie_rx_mb_s", "pcie_tx_mb_s"),
    *("power_w", "energy_j", "temp_c", "sm_clock_mhz", "mem_clock_mhz", "power_limited", "heat_limited"),
)
HOST_METRICS = (
    *("cpu_pct", "rss_gib", "loader_cpu_pct", "loader_lock_pct", "others_cpu_pct", "iowait_pct", "ram_available_gib"),
)
METRICS = (*GPU_METRICS, *HOST_METRICS)
SLOW_METRICS = frozenset({*GPU_METRICS[GPU_METRICS.index("pcie_rx_mb_s") :], "ram_available_gib"})
"""Figures that are read every `SLOW_S`; on cards with GPM, PCIe is read with its other figures. All others are read
every telemetry.interval_s."""
COLUMNS = ("time_s", "step", "phase", "gpu", *METRICS)
TIME_AXIS = "telemetry/time_s"
"""Axis of the curves in wandb."""


def prefix(gpu: int) -> str:
    """Returns the prefix of a figure's name: ``gpu0`` or ``host``."""
    return "host" if gpu == HOST else f"gpu{gpu}"


@cache
def curve(gpu: int, name: str) -> str:
    """Returns the name of a figure's curve: ``gpu0/util_pct``."""
    return f"{prefix(gpu)}/{name}"
