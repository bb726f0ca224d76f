"""The fake driver does what a scenario says, asked through the real pynvml."""

import ctypes
import itertools
import math
import subprocess
import sys
import threading
import time

import pynvml
import pytest

from tests.fake_nvml.driver import (
    DRAM_ACTIVE,
    DRIVER_NOT_LOADED,
    FUNCTIONS,
    GIB,
    INVALID_ARGUMENT,
    NO_DATA,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    PCIE_RX,
    PCIE_TX,
    SM_ACTIVE,
    SM_OCCUPANCY,
    SOURCE,
    TENSOR_ACTIVE,
    Failing,
    FakeGpu,
    FakeMig,
    Hang,
    Lost,
    Scenario,
    Wave,
    read_report,
)

EVERY_FUNCTION = [
    *["nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion"],
    *["nvmlSystemGetNVMLVersion", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"],
    *["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"],
    *["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode"],
    *["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"],
    *["nvmlDeviceGetDeviceHandleFromMigDeviceHandle", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"],
    *["nvmlDeviceIsMigDeviceHandle", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples"],
    *["nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTotalEnergyConsumption"],
    "nvmlDeviceGetTemperature",
    *["nvmlDeviceGetTemperatureV", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPcieThroughput"],
    *["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
    *["nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkGeneration"],
    *["nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetComputeRunningProcesses_v2"],
    *["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"],
    *["nvmlSystemGetProcessName", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc"],
    *["nvmlGpmSampleFree", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"],
]


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


def code_of(ask, *args):
    """The code of the NVMLError that the call raises, 0 when it answers."""
    try:
        ask(*args)
    except pynvml.NVMLError as error:
        return error.value
    return 0


def power_code(handle):
    return code_of(pynvml.nvmlDeviceGetPowerUsage, handle)


def gpu_samples(handle, last_seen_us=0, kind=pynvml.NVML_GPU_UTILIZATION_SAMPLES):
    return pynvml.nvmlDeviceGetSamples(handle, kind, last_seen_us)[1]


def metrics_between(one, two, numbers):
    asked = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(numbers), sample1=one, sample2=two)
    for entry, number in zip(asked.metrics, numbers, strict=False):
        entry.metricId = number
    pynvml.nvmlGpmMetricsGet(asked)
    return [(entry.nvmlReturn, entry.value) for entry in asked.metrics[: len(numbers)]]


def test_the_list_of_functions_is_what_the_library_exports(fake_driver):
    assert frozenset(EVERY_FUNCTION) == FUNCTIONS
    library = ctypes.CDLL(str(fake_driver.library))
    assert [name for name in EVERY_FUNCTION if not hasattr(library, name)] == []


def test_structures_are_as_large_as_pynvmls(fake_driver, tmp_path, cc):
    # The library writes into pynvml's structures: one that is smaller there would be overrun.
    names = {
        "nvmlMemory_t": pynvml.c_nvmlMemory_t,
        "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
        "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
        "nvmlTemperature_t": pynvml.c_nvmlTemperature_v1_t,
        "nvmlSample_t": pynvml.c_nvmlSample_t,
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


def test_cards_are_found_by_number_and_by_uuid(play):
    play(Scenario([FakeGpu("GPU-1"), FakeGpu("GPU-2", "NVIDIA GeForce RTX 4090")]))
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetName(card(1)) == "NVIDIA GeForce RTX 4090"
    assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(b"GPU-2")) == "NVIDIA GeForce RTX 4090"
    assert code_of(card, 2) == INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetHandleByUUID, b"GPU-3") == NOT_FOUND
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(card()) == []


def test_nothing_answers_unless_nvml_is_open(fake_driver):
    with fake_driver.load(Scenario([FakeGpu()])) as driver:
        assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
        pynvml.nvmlInit()
        pynvml.nvmlInit()
        handle = card()
        assert driver.num_users() == 2
        pynvml.nvmlShutdown()
        assert power_code(handle) == 0
        pynvml.nvmlShutdown()
        assert power_code(handle) == code_of(card) == pynvml.NVML_ERROR_UNINITIALIZED
        assert code_of(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, 999])
def test_init_answers_the_code_of_the_scenario_and_opens_nothing(fake_driver, code):
    with fake_driver.load(Scenario(init_error=code)) as driver:
        assert code_of(pynvml.nvmlInit) == code
        assert driver.num_users() == 0


def test_a_wave_swings_at_its_period(play):
    driver = play(Scenario([FakeGpu(util=Wave(9.5, 0.4, 20, 95), memory_util=Wave(4.0, 0.5, 0, 50), power_w=10)]))
    handle = card()
    seen = []
    for _ in range(38):
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        seen.append((rates.gpu, rates.memory))
        driver.advance(0.5)
    # Each point lies up to the test's own time after its half second: the edges at 3.8, 9.5, 13.3 and 19 s keep clear.
    assert [gpu for gpu, _ in seen[:8]] == [95] * 8
    assert {gpu for gpu, _ in seen[8:19]} == {20}
    assert {gpu for gpu, _ in seen[19:27]} == {95}
    assert {gpu for gpu, _ in seen[27:38]} == {20}
    assert [memory for _, memory in seen[:12]] == [50] * 4 + [0] * 4 + [50] * 4


def test_energy_is_the_integral_of_the_power(play):
    gpu = FakeGpu(power_w=Wave(10, 0.5, 100, 300), energy_start_j=5)
    driver = play(Scenario([gpu, FakeGpu("GPU-2", has_energy=False)]))
    before_s = driver.elapsed_s()
    joule = pynvml.nvmlDeviceGetTotalEnergyConsumption(card()) / 1e3
    assert 5 + 300 * before_s - 0.001 <= joule <= 5 + 300 * driver.elapsed_s()
    driver.advance(1000)
    joule = pynvml.nvmlDeviceGetTotalEnergyConsumption(card()) / 1e3
    assert 200_000 < joule < 200_000 + 5 + 300 * (driver.elapsed_s() - 1000)
    assert code_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, card(1)) == NOT_SUPPORTED


def test_time_passes_by_itself(play):
    driver = play(Scenario([FakeGpu()]))
    before_s, at_s = driver.elapsed_s(), time.monotonic()
    time.sleep(0.05)
    assert driver.elapsed_s() - before_s == pytest.approx(time.monotonic() - at_s, abs=0.03)


def test_samples_are_the_last_of_the_buffer_with_the_time_of_day(play):
    driver = play(Scenario([FakeGpu(util=Wave(2, 0.5, 0, 100), memory_util=7)], num_samples=60))
    driver.advance(10)
    samples = gpu_samples(card())
    assert len(samples) == 60
    steps_us = {later.timeStamp - sooner.timeStamp for sooner, later in itertools.pairwise(samples)}
    assert steps_us <= {166_666, 166_667}
    assert samples[-1].timeStamp / 1e6 == pytest.approx(time.time() + 10, abs=1)
    values = [sample.sampleValue.uiVal for sample in samples]
    assert 25 <= values.count(100) <= 35
    assert set(values) == {0, 100}
    values = gpu_samples(card(), kind=pynvml.NVML_MEMORY_UTILIZATION_SAMPLES)
    assert {sample.sampleValue.uiVal for sample in values} == {7}
    kind, _ = pynvml.nvmlDeviceGetSamples(card(), pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    assert code_of(gpu_samples, card(), 0, pynvml.NVML_TOTAL_POWER_SAMPLES) == NOT_SUPPORTED


def test_samples_that_were_seen_do_not_come_again(play):
    driver = play(Scenario([FakeGpu()], sample_spacing_s=100))
    newest_us = gpu_samples(card())[-1].timeStamp
    assert code_of(gpu_samples, card(), newest_us) == NOT_FOUND
    driver.advance(200)
    later = [sample.timeStamp - newest_us for sample in gpu_samples(card(), newest_us)]
    assert later == [100_000_000, 200_000_000]


def test_stale_samples_come_whatever_was_seen(play):
    driver = play(Scenario([FakeGpu(stale_samples=True)]))
    first = [sample.timeStamp for sample in gpu_samples(card())]
    driver.advance(60)
    assert [sample.timeStamp for sample in gpu_samples(card(), first[-1])] == first


def test_samples_may_lag(play):
    play(Scenario([FakeGpu(samples_lag_s=50), FakeGpu("GPU-2")], sample_spacing_s=10))
    lagging, prompt = (gpu_samples(card(number))[-1].timeStamp for number in (0, 1))
    assert prompt - lagging == 50_000_000


def test_gpm_gives_the_mean_between_two_samples(play):
    gpu = FakeGpu(
        *("GPU-1", "NVIDIA H200"),
        util=Wave(8, 0.5, 0, 80),
        pcie_rx_kb_s=2_097_152,
        pcie_tx_kb_s=524_288,
        gpm=True,
        gpm_errors={TENSOR_ACTIVE: NO_PERMISSION},
    )
    driver = play(Scenario([gpu, FakeGpu("GPU-2")]))
    assert pynvml.nvmlGpmQueryDeviceSupport(card()).isSupportedDevice == 1
    one, two = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(card(), one)
    driver.advance(800)
    pynvml.nvmlGpmSampleGet(card(), two)
    found = metrics_between(one, two, [SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_ACTIVE, PCIE_TX, PCIE_RX, 60])
    assert [code for code, _ in found] == [0, 0, NO_PERMISSION, 0, 0, 0, NOT_SUPPORTED]
    assert [value for _, value in found] == pytest.approx([40, 20, 0, 30, 500, 2000, 0], rel=0.01)


def test_gpm_samples_of_two_cards_do_not_mix(play):
    driver = play(Scenario([FakeGpu(gpm=True), FakeGpu("GPU-2", gpm=True)]))
    one, two = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(card(0), one)
    driver.advance(1)
    pynvml.nvmlGpmSampleGet(card(1), two)
    assert code_of(metrics_between, one, two, [SM_ACTIVE]) == INVALID_ARGUMENT


def test_gpm_refuses_what_has_no_mean(play):
    driver = play(Scenario([FakeGpu(gpm=True), FakeGpu("GPU-2")]))
    assert pynvml.nvmlGpmQueryDeviceSupport(card(1)).isSupportedDevice == 0
    one, two = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    assert code_of(pynvml.nvmlGpmSampleGet, card(1), one) == NOT_SUPPORTED
    assert code_of(metrics_between, one, two, [SM_ACTIVE]) == INVALID_ARGUMENT
    pynvml.nvmlGpmSampleGet(card(), one)
    assert metrics_between(one, one, [SM_ACTIVE]) == [(NO_DATA, 0)]
    assert driver.num_gpm_samples() == 2
    pynvml.nvmlGpmSampleFree(one)
    pynvml.nvmlGpmSampleFree(two)
    assert driver.num_gpm_samples() == 0
    assert code_of(pynvml.nvmlGpmSampleFree, one) == INVALID_ARGUMENT


def test_a_function_fails_for_one_card_or_for_all_and_at_its_time(play):
    refuses = FakeGpu(
        errors={
            "nvmlDeviceGetPcieThroughput": NO_PERMISSION,
            "nvmlDeviceGetPowerUsage": [Failing(NOT_SUPPORTED, 10, 20), Failing(NO_DATA, 30, 40)],
        }
    )
    everywhere = {"nvmlDeviceGetName": NOT_SUPPORTED, "nvmlSystemGetDriverVersion": Failing(999, to_s=15)}
    driver = play(Scenario([refuses, FakeGpu("GPU-2")], errors=everywhere))
    codes = [code_of(pynvml.nvmlDeviceGetPcieThroughput, card(number), 0) for number in (0, 1)]
    assert codes == [NO_PERMISSION, 0]
    assert [code_of(pynvml.nvmlDeviceGetName, card(number)) for number in (0, 1)] == [NOT_SUPPORTED] * 2
    seen = []
    for _ in range(5):
        seen.append((power_code(card()), power_code(card(1)), code_of(pynvml.nvmlSystemGetDriverVersion)))
        driver.advance(10)
    assert seen == [(0, 0, 999), (NOT_SUPPORTED, 0, 999), (0, 0, 0), (NO_DATA, 0, 0), (0, 0, 0)]


def test_a_lost_card_answers_nothing_and_comes_back(play):
    driver = play(Scenario([FakeGpu(lost=Lost(10, 20)), FakeGpu("GPU-2", lost=Lost(15))]))
    first, second = card(0), card(1)
    seen = []
    for _ in range(3):
        seen.append((power_code(first), code_of(card, 0), power_code(second), pynvml.nvmlDeviceGetCount()))
        driver.advance(10)
    assert seen == [(0, 0, 0, 2), (15, 15, 0, 2), (0, 0, 15, 2)]
    assert code_of(pynvml.nvmlDeviceGetUUID, second) == code_of(pynvml.nvmlDeviceGetHandleByUUID, b"GPU-2") == 15


def test_a_lost_card_may_be_back_only_for_those_who_open_nvml_again(play):
    driver = play(Scenario([FakeGpu(lost=Lost(10, 20, needs_init=True))]))
    handle = card()
    driver.advance(10)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert power_code(handle) == 15
    driver.advance(15)
    assert power_code(handle) == 15
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert power_code(handle) == 0


def test_a_slow_driver_takes_its_time_for_each_device_call(play):
    driver = play(Scenario([FakeGpu()], slow_ms=150, slow_from_s=100))
    handle = card()
    durations_s = []
    for _ in range(2):
        at_s = time.monotonic()
        pynvml.nvmlDeviceGetPowerUsage(handle)
        durations_s.append(time.monotonic() - at_s)
        driver.advance(100)
    assert durations_s[0] < 0.1
    assert durations_s[1] >= 0.15


def test_a_function_hangs_once_or_always_and_leaves_other_threads_alone(play):
    hangs = [Hang("nvmlDeviceGetPowerUsage", 0.3, 50, once=True), Hang("nvmlDeviceGetTemperature", 0.06)]
    driver = play(Scenario([FakeGpu()], hangs=hangs))
    handle = card()
    took_s = {}

    def ask(name, function, *args):
        at_s = time.monotonic()
        function(*args)
        took_s[name] = time.monotonic() - at_s

    ask("before", pynvml.nvmlDeviceGetPowerUsage, handle)
    driver.advance(50)
    hanging = threading.Thread(target=ask, args=("hanging", pynvml.nvmlDeviceGetPowerUsage, handle))
    hanging.start()
    ask("meanwhile", pynvml.nvmlDeviceGetName, handle)
    assert hanging.is_alive()
    ask("temp 1", pynvml.nvmlDeviceGetTemperature, handle, 0)
    ask("temp 2", pynvml.nvmlDeviceGetTemperature, handle, 0)
    hanging.join()
    ask("after", pynvml.nvmlDeviceGetPowerUsage, handle)
    assert took_s["hanging"] >= 0.3
    assert min(took_s["temp 1"], took_s["temp 2"]) >= 0.06
    assert max(took_s["before"], took_s["meanwhile"], took_s["after"]) < 0.25


def test_init_may_hang(fake_driver):
    with fake_driver.load(Scenario(hangs=[Hang("nvmlInitWithFlags", 0.05)])):
        at_s = time.monotonic()
        pynvml.nvmlInit()
        assert time.monotonic() - at_s >= 0.05
        pynvml.nvmlShutdown()


def test_a_flaky_driver_fails_every_kth_device_call(play):
    play(Scenario([FakeGpu()], fail_every=3))
    handle = card()  # the first call
    assert [power_code(handle) for _ in range(8)] == [0, 999, 0, 0, 999, 0, 0, 999]
    assert code_of(pynvml.nvmlDeviceGetCount) == 0


def test_calls_of_two_threads_are_all_counted(play):
    driver = play(Scenario([FakeGpu(), FakeGpu("GPU-2")], fail_every=10, fail_code=NO_DATA))
    handles = [card(0), card(1)]
    failures = []

    def ask(handle):
        failures.extend(code for code in (power_code(handle) for _ in range(2000)) if code == NO_DATA)

    threads = [threading.Thread(target=ask, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.num_calls("nvmlDeviceGetPowerUsage") == 4000
    assert len(failures) == 400


def test_mig_instances_have_handles_of_their_own(play):
    instances = [FakeMig("MIG-1", "1g.18gb", 16, 2, gpu_instance_id=7), None, FakeMig("MIG-2", gpu_instance_id=9)]
    play(Scenario([FakeGpu("GPU-whole", mig_capable=True), FakeGpu("GPU-split", mig=instances), FakeGpu("GPU-rtx")]))
    modes = [code_of(pynvml.nvmlDeviceGetMigMode, card(number)) for number in range(3)]
    assert modes == [0, 0, NOT_SUPPORTED]
    assert [pynvml.nvmlDeviceGetMigMode(card(number))[0] for number in (0, 1)] == [0, 1]
    assert [pynvml.nvmlDeviceGetMaxMigDeviceCount(card(number)) for number in range(3)] == [7, 7, 0]
    slots = [code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, card(1), slot) for slot in (0, 1, 2, 3, 7)]
    assert slots == [0, NOT_FOUND, 0, NOT_FOUND, INVALID_ARGUMENT]
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card(1), 0)
    assert (pynvml.nvmlDeviceGetUUID(mig), pynvml.nvmlDeviceGetName(mig)) == ("MIG-1", "1g.18gb")
    assert pynvml.nvmlDeviceGetMemoryInfo(mig, version=pynvml.nvmlMemory_v2).free == 14 * GIB
    assert (pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)) == (7, 0)
    assert [pynvml.nvmlDeviceIsMigDeviceHandle(handle).value for handle in (mig, card(1))] == [1, 0]
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert pynvml.nvmlDeviceGetUUID(parent) == "GPU-split"
    assert code_of(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, parent) == INVALID_ARGUMENT
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(b"MIG-2")) == "MIG-2"
    assert pynvml.nvmlDeviceGetCount() == 3


def test_mig_refuses_utilisation_unless_the_scenario_lets_it_answer(play):
    answers = FakeMig("MIG-2", errors={"nvmlDeviceGetPowerUsage": Failing(0)})
    driver = play(Scenario([FakeGpu("GPU-1", mig=[FakeMig("MIG-1"), answers], lost=Lost(10))]))
    migs = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card(), slot) for slot in (0, 1)]
    for handle in [card(), migs[0]]:
        assert code_of(pynvml.nvmlDeviceGetUtilizationRates, handle) == NOT_SUPPORTED
        assert code_of(gpu_samples, handle) == NOT_SUPPORTED
    assert [power_code(handle) for handle in [card(), *migs]] == [0, NOT_SUPPORTED, 0]
    driver.advance(10)
    assert code_of(pynvml.nvmlDeviceGetUUID, migs[0]) == 15


def test_gpm_of_an_instance_is_asked_of_its_card(play):
    mig = FakeMig("MIG-1", util=30, gpu_instance_id=5)
    driver = play(Scenario([FakeGpu(gpm=True, mig=[mig])]))
    one, two = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmMigSampleGet(card(), 5, one)
    driver.advance(1)
    pynvml.nvmlGpmMigSampleGet(card(), 5, two)
    assert metrics_between(one, two, [SM_ACTIVE]) == [(0, pytest.approx(30))]
    assert code_of(pynvml.nvmlGpmMigSampleGet, card(), 6, two) == NOT_FOUND


def test_another_scenario_can_be_played_while_nvml_is_open(play):
    driver = play(Scenario([FakeGpu(util=10)]))
    handle = card()
    driver.advance(100)
    driver.switch(Scenario([FakeGpu(util=90)]))
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 90
    assert driver.elapsed_s() >= 100
    pynvml.nvmlShutdown()
    driver.switch(Scenario([FakeGpu(), FakeGpu("GPU-2")]))
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2
    assert driver.elapsed_s() < 50
    assert driver.num_calls("nvmlDeviceGetUtilizationRates") == 0


def test_pynvml_is_put_back_after_the_block(fake_driver):
    before = pynvml.nvmlLib
    with fake_driver.load(Scenario([FakeGpu()])) as driver:
        pynvml.nvmlInit()
        assert pynvml.nvmlLib is driver.lib
        with fake_driver.load(Scenario([FakeGpu(), FakeGpu("GPU-2")])):
            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetCount() == 2
        assert pynvml.nvmlDeviceGetCount() == 1
    assert pynvml.nvmlLib is before


def test_no_block_loads_over_the_library_of_another(fake_driver):
    files = []
    for _ in range(5):
        with fake_driver.without("nvmlErrorString").load(Scenario([FakeGpu()])) as driver:
            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetCount() == 1
            assert driver.num_users() == 1  # not those that the blocks before left open
            files.append(driver.lib._name)
    assert len(set(files)) == 5


def test_a_function_left_out_is_not_found(fake_driver):
    older = fake_driver.without("nvmlDeviceGetMemoryInfo_v2")
    assert hasattr(ctypes.CDLL(str(fake_driver.library)), "nvmlDeviceGetMemoryInfo_v2")
    assert not hasattr(ctypes.CDLL(str(older.library)), "nvmlDeviceGetMemoryInfo_v2")
    with older.load(Scenario([FakeGpu()])):
        pynvml.nvmlInit()
        ask = pynvml.nvmlDeviceGetMemoryInfo
        assert code_of(ask, card(), pynvml.nvmlMemory_v2) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert ask(card()).total == 80 * GIB


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


def test_the_file_is_read_again_when_nvml_is_opened_again(fake_driver):
    code = (
        "import os, pynvml\n"
        "for _ in range(2):\n"
        "    pynvml.nvmlInit(); pynvml.nvmlInit()\n"
        "    print(pynvml.nvmlDeviceGetCount())\n"
        "    pynvml.nvmlShutdown(); pynvml.nvmlShutdown()\n"
        "    open(os.environ['FAKE_NVML_SCENARIO'], 'a').write('gpu GPU-2\\n')\n"
    )
    environment = fake_driver.environment(Scenario([FakeGpu()]))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n2\n", "")


def test_a_wrong_scenario_is_refused(tmp_path, fake_driver):
    with pytest.raises(ValueError, match="no function nvmlDeviceGetCount;"):
        Scenario(errors={"nvmlDeviceGetCount": 3}).write(tmp_path / "s")
    with pytest.raises(ValueError, match="no function nvmlInit;"):
        Scenario(hangs=[Hang("nvmlInit", 1)]).write(tmp_path / "s")
    with pytest.raises(ValueError, match="one line"):
        Scenario(driver="580\n").write(tmp_path / "s")
    with pytest.raises(ValueError, match="not a wave"):
        Wave(0)
    with pytest.raises(ValueError, match="no function nvmlX"):
        _ = fake_driver.without("nvmlX").library


def test_a_file_that_is_not_understood_is_said(tmp_path, fake_driver):
    scenario = tmp_path / "scenario.txt"
    scenario.write_text("driver 580\ngpu GPU-1\nutil 5\n")
    environment = {**fake_driver.environment(Scenario()), "FAKE_NVML_SCENARIO": str(scenario)}
    code = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as e: print(e.value)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{INVALID_ARGUMENT}\n"
    assert "not understood: util 5" in done.stderr


def test_every_field_of_a_scenario_is_written(tmp_path):
    text = Scenario([FakeGpu(lost=Lost(1, math.inf, True), mig=[FakeMig("MIG-1")])]).write(tmp_path / "s").read_text()
    assert {"lost_from_s 1", "lost_to_s inf", "lost_needs_init 1", "mig MIG-1", "slot 0"} <= set(text.splitlines())
