"""The fake driver does what a scenario says, asked through the real pynvml."""

import ctypes
import subprocess
import sys

import pynvml
import pytest

from tests.fake_nvml.driver import (
    GIB,
    SOURCE,
    FakeGpu,
    Scenario,
    read_report,
)


@pytest.fixture
def play(fake_driver):
    """``play(scenario)`` loads it, opens NVML and gives the driver; closed and put back after the test."""
    blocks = []

    def enter(scenario):
        block = fake_driver.load(scenario)
        blocks.append(block)
        driver = block.__enter__()
        pynvml.nvmlInit()
        return driver

    yield enter
    for block in blocks:
        pynvml.nvmlShutdown()
        block.__exit__(None, None, None)


def card(number=0):
    return pynvml.nvmlDeviceGetHandleByIndex(number)


def test_structures_are_as_large_as_pynvmls(fake_driver, tmp_path, cc):
    # The library writes into pynvml's structures: one that is smaller there would be overrun.
    names = {
        "nvmlMemory_t": pynvml.c_nvmlMemory_t,
        "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
        "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
        "nvmlTemperature_t": pynvml.c_nvmlTemperature_v1_t,
        "nvmlProcessInfo_t": pynvml.c_nvmlProcessInfo_v3_t,
        "nvmlGpmMetric_t": pynvml.c_nvmlGpmMetric_t,
        "nvmlGpmSupport_t": pynvml.c_nvmlGpmSupport_t,
    }
    prints = "".join(f'printf("%zu\\n", sizeof({name}));' for name in names)
    source = tmp_path / "sizes.c"
    source.write_text(f'#include "{SOURCE}"\nint main(void) {{ {prints} return 0; }}\n')
    subprocess.run([cc, source, "-o", tmp_path / "sizes", "-lm", "-pthread"], check=True)
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout
    assert [int(size) for size in printed.split()] == [ctypes.sizeof(kind) for kind in names.values()]
    assert pynvml.c_nvmlGpmMetricsGet_t.metrics.offset == 24


def test_a_card_is_what_the_scenario_says(play):
    gpu = FakeGpu(
        *("GPU-1", "NVIDIA A100"),
        **{"total_gib": 40, "used_gib": 3, "reserved_gib": 0.5, "capability": (8, 0), "temp_c": 61, "power_w": 250.5},
        **{"util": 77, "memory_util": 33, "sm_clock_mhz": 1410, "mem_clock_mhz": 1215, "event_reasons": 0x44},
        **{"pcie_rx_kb_s": 1000, "pcie_tx_kb_s": 200, "pcie_generation": 3, "pcie_width": 8},
        **{"max_pcie_generation": 4, "max_pcie_width": 16, "processes": [(4321, 2.5)]},
    )
    play(Scenario([gpu], driver="550.1", nvml="12.550.1"))
    assert pynvml.nvmlSystemGetDriverVersion() == "550.1"
    assert pynvml.nvmlSystemGetNVMLVersion() == "12.550.1"
    handle = card()
    assert (pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)) == ("GPU-1", "NVIDIA A100")
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (8, 0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert [memory.total, memory.used, memory.reserved, memory.free] == [40 * GIB, 3 * GIB, GIB // 2, 73 * GIB // 2]
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert [memory.total, memory.used, memory.free] == [40 * GIB, 7 * GIB // 2, 73 * GIB // 2]
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    assert (rates.gpu, rates.memory) == (77, 33)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 250_500
    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 61
    assert pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU) == 61
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 1410
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) == 1215
    assert pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES) == 1000
    assert pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES) == 200
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 0x44
    assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == 0x44
    assert pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle) == 3
    assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle) == 8
    assert pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle) == 4
    assert pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle) == 16
    for list_processes in [
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
    ]:
        (process,) = list_processes(handle)
        assert (process.pid, process.usedGpuMemory) == (4321, 5 * GIB // 2)


def test_a_subprocess_finds_the_driver_and_reports_its_calls(fake_driver, tmp_path):
    code = (
        "import pynvml\n"
        "pynvml.nvmlInit()\n"
        "print(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1)))\n"
        "pynvml.nvmlGpmSampleAlloc(); pynvml.nvmlDeviceGetCount(); pynvml.nvmlDeviceGetCount()\n"
    )
    environment = fake_driver.environment(
        Scenario([FakeGpu(), FakeGpu("GPU-2", "Tesla T4")]), report=tmp_path / "report"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("Tesla T4\n", "")
    (counts,) = read_report(tmp_path / "report")
    assert counts["nvmlDeviceGetCount_v2"] == 2
    assert (counts["users"], counts["gpm_samples"]) == (1, 1)
