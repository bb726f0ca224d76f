"""The one table of published figures: telemetry.csv, wandb and docs/telemetry.md take their names from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rate = Literal["fast", "slow"]
SLOW_S = 5.0
"""Seconds between readings of what changes slowly or is dear to ask; never less than telemetry.interval_s."""
HOST = -1
"""Stands for the host where a GPU's number is expected."""


@dataclass(frozen=True)
class Metric:
    """One published figure."""

    name: str
    """Column of telemetry.csv; in wandb with ``gpu<number>/`` or ``host/`` before it."""
    unit: str
    rate: Rate
    """fast = every telemetry.interval_s, slow = every `SLOW_S`."""
    source: str
    meaning: str


GPU_METRICS = (
    Metric(
        "util_pct",
        "%",
        "fast",
        "nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
        "share of time in which any kernel ran; 100 does not mean that the GPU is full",
    ),
    Metric(
        "mem_util_pct",
        "%",
        "fast",
        "nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
        "share of time in which device memory was read or written; not how much of it is in use",
    ),
    Metric(
        "mem_used_gib",
        "GiB",
        "fast",
        "nvmlDeviceGetMemoryInfo",
        "device memory held by all processes, without the driver's own reserve",
    ),
    Metric("sm_active_pct", "%", "fast", "GPM 2", "share of the multiprocessors (SM) at work, mean over the interval"),
    Metric("sm_occupancy_pct", "%", "fast", "GPM 3", "warps in flight against the most that the SMs can hold"),
    Metric("tensor_active_pct", "%", "fast", "GPM 5", "share of time in which the SMs' tensor cores were at work"),
    Metric("dram_active_pct", "%", "fast", "GPM 10", "device memory bandwidth in use against the most there is"),
    Metric(
        "pcie_rx_mb_s",
        "MB/s",
        "slow",
        "GPM 21 (fast), else nvmlDeviceGetPcieThroughput",
        "from host to device over PCIe; 10^6 bytes. Without GPM the driver's last 20 ms",
    ),
    Metric(
        "pcie_tx_mb_s",
        "MB/s",
        "slow",
        "GPM 20 (fast), else nvmlDeviceGetPcieThroughput",
        "from device to host over PCIe; as above",
    ),
    Metric(
        "power_w",
        "W",
        "slow",
        "nvmlDeviceGetTotalEnergyConsumption, else nvmlDeviceGetPowerUsage",
        "mean power since the reading before, from the energy counter; the first reading, and cards without the "
        "counter, are the sensor's",
    ),
    Metric(
        "energy_j",
        "J",
        "slow",
        "as power_w",
        "energy since this part of the run began to be watched; sums up power_w where there is no counter",
    ),
    Metric("temp_c", "°C", "slow", "nvmlDeviceGetTemperature", "temperature of the GPU's die"),
    Metric("sm_clock_mhz", "MHz", "slow", "nvmlDeviceGetClockInfo", "clock of the multiprocessors"),
    Metric("mem_clock_mhz", "MHz", "slow", "nvmlDeviceGetClockInfo", "clock of the device memory"),
    Metric(
        "power_limited",
        "0 or 1",
        "slow",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "1 = clocks are held down by a power limit; the mean is the share of readings",
    ),
    Metric(
        "heat_limited",
        "0 or 1",
        "slow",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "1 = clocks are held down by temperature",
    ),
)

HOST_METRICS = (
    Metric(
        "cpu_pct",
        "%",
        "fast",
        "psutil",
        "CPU time of this process and those it started (data workers, wandb's service); 100 = one core kept busy",
    ),
    Metric(
        "rss_gib",
        "GiB",
        "fast",
        "psutil",
        "resident memory of this process and those it started; pages that they share count in each",
    ),
)

METRICS = (*GPU_METRICS, *HOST_METRICS)
COLUMNS = ("time_s", "step", "phase", "gpu", *(metric.name for metric in METRICS))
"""Columns of telemetry.csv."""
TIME_AXIS = "telemetry/time_s"
"""What the curves are drawn against in wandb."""


def prefix(gpu: int) -> str:
    """What stands before a figure's name where those of several GPUs and the host are together."""
    return "host" if gpu == HOST else f"gpu{gpu}"
