"""Lists every published figure, once: telemetry.csv, wandb and docs/telemetry.md take its name from here, and the table
says how a GPU is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from wellfed.nvml import readings
from wellfed.nvml.gpm import Gpm

Rate = Literal["fast", "slow"]
SLOW_S = 5.0
"""Seconds between readings of what changes slowly or is dear to ask; never less than telemetry.interval_s."""
HOST = -1
"""Stands for the host where a GPU's number is expected."""


@dataclass(frozen=True)
class GpuReaders:
    """What one GPU is read through, and what must be remembered of it from reading to reading."""

    device: readings.OpenDevice
    utilisation: readings.Utilisation
    memory_utilisation: readings.Utilisation
    gpm: Gpm
    power: readings.Power


Ask = Callable[[GpuReaders], float | Mapping[str, float]]
"""Asks the driver for a figure, or for several by their names; raises as `wellfed.nvml.readings` does."""


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
    asks: tuple[Ask, ...] = ()
    """How a GPU is asked for it, a later one where those before it give no answer. Figures with the same one are
    answered together."""


def gpm(gpu: GpuReaders) -> Mapping[str, float]:
    """What the multiprocessors did, and PCIe; what this device does not offer of it is left out."""
    return gpu.gpm.read()


def power(gpu: GpuReaders) -> Mapping[str, float]:
    """Power and energy: counted over time, and so read at the edges of training too."""
    return gpu.power.read()


def _limits(gpu: GpuReaders) -> Mapping[str, float]:
    limits = readings.clock_limits(gpu.device)
    return {"power_limited": float(limits.power), "heat_limited": float(limits.heat)}


GPU_METRICS = (
    Metric(
        "util_pct",
        "%",
        "fast",
        "nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
        "share of time in which any kernel ran; 100 does not mean that the GPU is full",
        (lambda gpu: gpu.utilisation.read(),),
    ),
    Metric(
        "mem_util_pct",
        "%",
        "fast",
        "nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
        "share of time in which device memory was read or written; not how much of it is in use",
        (lambda gpu: gpu.memory_utilisation.read(),),
    ),
    Metric(
        "mem_used_gib",
        "GiB",
        "fast",
        "nvmlDeviceGetMemoryInfo",
        "device memory held by all processes, without the driver's own reserve",
        (lambda gpu: readings.memory_used_gib(gpu.device),),
    ),
    Metric(
        "sm_active_pct",
        "%",
        "fast",
        "GPM 2",
        "share of the multiprocessors (SM) at work, mean over the interval",
        (gpm,),
    ),
    Metric("sm_occupancy_pct", "%", "fast", "GPM 3", "warps in flight against the most that the SMs can hold", (gpm,)),
    Metric(
        "tensor_active_pct", "%", "fast", "GPM 5", "share of time in which the SMs' tensor cores were at work", (gpm,)
    ),
    Metric(
        "dram_active_pct", "%", "fast", "GPM 10", "device memory bandwidth in use against the most there is", (gpm,)
    ),
    Metric(
        "pcie_rx_mb_s",
        "MB/s",
        "slow",
        "GPM 21 (fast), else nvmlDeviceGetPcieThroughput",
        "from host to device over PCIe; 10^6 bytes. Without GPM the driver's last 20 ms",
        (gpm, lambda gpu: readings.pcie_mb_s(gpu.device, "RX")),
    ),
    Metric(
        "pcie_tx_mb_s",
        "MB/s",
        "slow",
        "GPM 20 (fast), else nvmlDeviceGetPcieThroughput",
        "from device to host over PCIe; as above",
        (gpm, lambda gpu: readings.pcie_mb_s(gpu.device, "TX")),
    ),
    Metric(
        "power_w",
        "W",
        "slow",
        "nvmlDeviceGetTotalEnergyConsumption, else nvmlDeviceGetPowerUsage",
        "mean power since the reading before, from the energy counter; the first reading, and cards without the "
        "counter, are the sensor's",
        (power,),
    ),
    Metric(
        "energy_j",
        "J",
        "slow",
        "as power_w",
        "energy since this part of the run began to be watched; sums up power_w where there is no counter",
        (power,),
    ),
    Metric(
        "temp_c",
        "°C",
        "slow",
        "nvmlDeviceGetTemperature",
        "temperature of the GPU's die",
        (lambda gpu: readings.temperature_c(gpu.device),),
    ),
    Metric(
        "sm_clock_mhz",
        "MHz",
        "slow",
        "nvmlDeviceGetClockInfo",
        "clock of the multiprocessors",
        (lambda gpu: readings.clock_mhz(gpu.device, "SM"),),
    ),
    Metric(
        "mem_clock_mhz",
        "MHz",
        "slow",
        "nvmlDeviceGetClockInfo",
        "clock of the device memory",
        (lambda gpu: readings.clock_mhz(gpu.device, "MEM"),),
    ),
    Metric(
        "power_limited",
        "0 or 1",
        "slow",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "1 = clocks are held down by a power limit; the mean is the share of readings",
        (_limits,),
    ),
    Metric(
        "heat_limited",
        "0 or 1",
        "slow",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "1 = clocks are held down by temperature",
        (_limits,),
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


def gpu_questions() -> dict[Ask, list[Metric]]:
    """What to ask a GPU, in order, with the figures that each answer may hold; what only stands in comes last."""
    questions: dict[Ask, list[Metric]] = {}
    for place in range(max(len(metric.asks) for metric in GPU_METRICS)):
        for metric in GPU_METRICS:
            for ask in metric.asks[place : place + 1]:
                questions.setdefault(ask, []).append(metric)
    return questions
