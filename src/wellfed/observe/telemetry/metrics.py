"""Lists every published figure: its name in telemetry.csv and wandb, and the queries that give it.

docs/telemetry.md explains each figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Literal

from wellfed.observe.nvml import readings
from wellfed.observe.nvml.gpm import Gpm
from wellfed.observe.telemetry.machines import is_host, named

Rate = Literal["fast", "slow"]
SLOW_S = 5.0
"""Seconds between readings of metrics that change slowly or are expensive. At least telemetry.interval_s."""


class GpuReaders:
    """Readers of one GPU, which keep state between readings."""

    def __init__(self, uuid: str, *, is_mig: bool, now_s: Callable[[], float]) -> None:
        self.device = readings.OpenDevice(uuid)
        self.utilisation = readings.Utilisation(self.device, "gpu", now_s=now_s)
        self.memory_utilisation = readings.Utilisation(self.device, "memory", now_s=now_s)
        self.gpm = Gpm(self.device, is_mig=is_mig, now_s=now_s)
        self.power = readings.Power(self.device, now_s=now_s)


Query = Callable[[GpuReaders], float | Mapping[str, float]]
"""Query of the driver for one figure, or for several by name. Raises as `wellfed.observe.nvml.readings` does."""


@dataclass(frozen=True)
class Metric:
    """One published figure."""

    name: str
    """Column of telemetry.csv; in wandb with ``gpu<number>/`` or ``host/`` before it."""
    rate: Rate
    """fast = every telemetry.interval_s, slow = every `SLOW_S`."""
    queries: tuple[Query, ...] = ()
    """Queries of a GPU that give it, in order of preference. One query may give several figures."""


def gpm(gpu: GpuReaders) -> Mapping[str, float]:
    """Returns the figures of multiprocessors and PCIe; absent ones are left out."""
    return gpu.gpm.read()


def power(gpu: GpuReaders) -> Mapping[str, float]:
    """Returns power and energy. They are counted over time, so they are also read when training begins or ends."""
    return gpu.power.read()


def _limits(gpu: GpuReaders) -> Mapping[str, float]:
    return readings.clock_limits(gpu.device)


GPU_METRICS = (
    Metric("util_pct", "fast", (lambda gpu: gpu.utilisation.read(),)),
    Metric("mem_util_pct", "fast", (lambda gpu: gpu.memory_utilisation.read(),)),
    Metric("mem_used_gib", "fast", (lambda gpu: readings.memory_used_gib(gpu.device),)),
    Metric("sm_active_pct", "fast", (gpm,)),
    Metric("sm_occupancy_pct", "fast", (gpm,)),
    Metric("tensor_active_pct", "fast", (gpm,)),
    Metric("dram_active_pct", "fast", (gpm,)),
    Metric("pcie_rx_mb_s", "slow", (gpm, lambda gpu: readings.pcie_mb_s(gpu.device, "RX"))),
    Metric("pcie_tx_mb_s", "slow", (gpm, lambda gpu: readings.pcie_mb_s(gpu.device, "TX"))),
    Metric("power_w", "slow", (power,)),
    Metric("energy_j", "slow", (power,)),
    Metric("temp_c", "slow", (lambda gpu: readings.temperature_c(gpu.device),)),
    Metric("sm_clock_mhz", "slow", (lambda gpu: readings.clock_mhz(gpu.device, "SM"),)),
    Metric("mem_clock_mhz", "slow", (lambda gpu: readings.clock_mhz(gpu.device, "MEM"),)),
    Metric("power_limited", "slow", (_limits,)),
    Metric("heat_limited", "slow", (_limits,)),
)
HOST_METRICS = (
    *(Metric(name, "fast") for name in ("cpu_pct", "rss_gib", "loader_cpu_pct", "loader_lock_pct")),
    *(Metric(name, "fast") for name in ("others_cpu_pct", "iowait_pct")),
    Metric("ram_available_gib", "slow"),
)
METRICS = (*GPU_METRICS, *HOST_METRICS)
COLUMNS = ("time_s", "step", "phase", "gpu", *(metric.name for metric in METRICS))
TIME_AXIS = "telemetry/time_s"
"""Axis of the curves in wandb."""


@cache
def prefix(gpu: int) -> str:
    """Returns the prefix of a figure's name: ``gpu0``, ``host`` or ``node1/gpu0``."""
    if is_host(gpu):
        return str(named(gpu)).replace("-1", "host")
    *node, index = str(named(gpu)).split("/")
    return "/".join([*node, f"gpu{index}"])


@cache
def curve(gpu: int, name: str) -> str:
    """Returns the name of a figure's curve: ``gpu0/util_pct``."""
    return f"{prefix(gpu)}/{name}"


def gpu_queries() -> dict[Query, list[Metric]]:
    """Returns the queries of a GPU in order, with the figures that each gives. Fallbacks come last."""
    queries: defaultdict[Query, list[Metric]] = defaultdict(list)
    for alternatives in zip_longest(*(metric.queries for metric in GPU_METRICS)):
        for metric, ask in zip(GPU_METRICS, alternatives, strict=True):
            if ask is not None:
                queries[ask].append(metric)
    return queries
