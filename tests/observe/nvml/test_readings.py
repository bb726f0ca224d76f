import time
from contextlib import ExitStack

import pytest

from tests.fake_nvml.driver import (
    NO_DATA,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    UNKNOWN,
    FakeGpu,
    Lost,
    Scenario,
    Wave,
)
from wellfed.observe.nvml.readings import (
    POWER_WINDOW_S,
    STALE_S,
    OpenDevice,
    Power,
    Utilisation,
    clock_limits,
    clock_mhz,
    memory_used_gib,
    pcie_mb_s,
    temperature_c,
)
from wellfed.observe.nvml.session import (
    GpuLostError,
    NoDataError,
    NotFoundError,
    NotSupportedError,
    NvmlAbsentError,
    NvmlError,
    NvmlSession,
)


@pytest.fixture
def opened(fake_driver):
    """``opened(gpu)`` is (driver, device); the scenario of the driver takes ``options``."""
    with ExitStack() as stack:

        def begin(gpu, driver=fake_driver, **options):
            loaded = stack.enter_context(driver.load(Scenario([gpu], **options)))
            device = OpenDevice(gpu.uuid)
            device.open(stack.enter_context(NvmlSession()))
            return loaded, device

        yield begin


class Clock:
    """A driver's time and ours; ``pass_s`` lets both go on, what the calls take counts for neither of ours."""

    def __init__(self, driver) -> None:
        self._driver = driver
        self.now_s = 50.0
        self.epoch_s = time.time()

    def pass_s(self, seconds: float) -> None:
        self._driver.advance(seconds)
        self.now_s += seconds
        self.epoch_s += seconds


def utilisation(driver, device, of="gpu"):
    clock = Clock(driver)
    return clock, Utilisation(device, of, now_s=lambda: clock.now_s, epoch_s=lambda: clock.epoch_s)


def power(driver, device):
    """On the driver's own clock, so that energy and time go together."""
    return Power(device, now_s=driver.elapsed_s)


# ---- Devices ----


def test_a_device_is_found_by_uuid_not_by_number(fake_driver):
    with fake_driver.load(Scenario([FakeGpu("GPU-1", temp_c=30), FakeGpu("GPU-2", temp_c=60)])), NvmlSession() as nvml:
        device = OpenDevice("GPU-2")
        device.open(nvml)
        assert temperature_c(device) == 60
        assert device.session is nvml


def test_a_device_that_is_not_there_is_not_found(fake_driver):
    with (
        fake_driver.load(Scenario([FakeGpu("GPU-1")])),
        NvmlSession() as nvml,
        pytest.raises(NotFoundError, match="nvmlDeviceGetHandleByUUID"),
    ):
        OpenDevice("GPU-2").open(nvml)


def test_a_device_may_be_opened_again_in_another_session(fake_driver):
    device = OpenDevice("GPU-1")
    with fake_driver.load(Scenario([FakeGpu("GPU-1", temp_c=30)])):
        for _ in range(2):
            with NvmlSession() as nvml:
                device.open(nvml)
                assert temperature_c(device) == 30


# ---- Single figures ----


def test_memory_is_without_the_drivers_reserve(opened):
    _, device = opened(FakeGpu(used_gib=3, reserved_gib=0.5))
    assert memory_used_gib(device) == 3


def test_memory_that_is_shared_with_the_host_is_not_offered(opened):
    names = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"]
    _, device = opened(FakeGpu(errors=dict.fromkeys(names, NOT_SUPPORTED)))
    with pytest.raises(NotSupportedError, match="nvmlDeviceGetMemoryInfo"):
        memory_used_gib(device)


@pytest.mark.parametrize("answer", ["missing", "refused"])
def test_temperature_is_asked_the_old_way_too(opened, fake_driver, answer):
    if answer == "missing":
        _, device = opened(FakeGpu(temp_c=71), fake_driver.without("nvmlDeviceGetTemperatureV"))
    else:
        _, device = opened(FakeGpu(temp_c=71, errors={"nvmlDeviceGetTemperatureV": NOT_SUPPORTED}))
    assert temperature_c(device) == 71


def test_clocks_and_pcie_in_our_units(opened):
    _, device = opened(FakeGpu(sm_clock_mhz=1410, mem_clock_mhz=1215, pcie_rx_kb_s=12_500, pcie_tx_kb_s=3_000))
    assert (clock_mhz(device, "SM"), clock_mhz(device, "MEM")) == (1410, 1215)
    assert (pcie_mb_s(device, "RX"), pcie_mb_s(device, "TX")) == (12.5, 3.0)


@pytest.mark.parametrize(
    ("bits", "limits"),
    [
        (0x0, (False, False)),
        (0x1, (False, False)),  # idle
        (0x2, (False, False)),  # clocks set by somebody
        (0x4, (True, False)),  # power cap
        (0x8, (False, False)),  # hardware slowdown of either cause: another bit says which
        (0x20, (False, True)),  # temperature, by software
        (0x40, (False, True)),  # temperature, by hardware
        (0x80, (True, False)),  # power brake
        (0x48, (False, True)),
        (0x1 | 0x4 | 0x20, (True, True)),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_what_holds_the_clocks_down(opened, fake_driver, bits, limits, older):
    driver = fake_driver.without("nvmlDeviceGetCurrentClocksEventReasons") if older else fake_driver
    _, device = opened(FakeGpu(event_reasons=bits), driver)
    assert tuple(clock_limits(device).values()) == limits


# ---- Utilisation ----


def test_utilisation_is_the_mean_since_the_reading_before(opened):
    # 40 % of each 2 s at 100: a glance would say 100 or 0.
    driver, device = opened(FakeGpu(util=Wave(2.0, 0.4, 0, 100), memory_util=Wave(2.0, 0.2, 0, 50)))
    clock, gpu = utilisation(driver, device)
    memory = Utilisation(device, "memory", now_s=lambda: clock.now_s, epoch_s=lambda: clock.epoch_s)
    gpu.read(), memory.read()
    for _ in range(3):
        clock.pass_s(4.0)
        assert gpu.read() == pytest.approx(40, abs=9)
        assert memory.read() == pytest.approx(10, abs=5)


def test_the_first_reading_is_not_the_mean_of_what_went_before(opened):
    driver, device = opened(FakeGpu(util=Wave(1e6, 0.5, low=0, high=90)))
    clock, gpu = utilisation(driver, device)
    clock.pass_s(3.0)  # of the 16 s in the buffer most were before second 0, where the wave is low
    assert gpu.read() == 90


def test_between_two_samples_the_latest_rate_is_taken(opened):
    driver, device = opened(FakeGpu(util=50), sample_spacing_s=1000.0)
    clock, gpu = utilisation(driver, device)
    gpu.read()
    driver.switch(Scenario([FakeGpu(util=70)], sample_spacing_s=1000.0))
    clock.pass_s(0.1)
    assert gpu.read() == 70


def test_between_two_samples_without_a_rate_there_is_nothing(opened):
    driver, device = opened(
        FakeGpu(util=50, errors={"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED}), sample_spacing_s=1000.0
    )
    _, gpu = utilisation(driver, device)
    assert gpu.read() == 50
    with pytest.raises(NoDataError):
        gpu.read()


def test_without_a_buffer_the_rate_is_taken_and_the_buffer_no_longer_asked_for(opened):
    driver, device = opened(FakeGpu(util=64, errors={"nvmlDeviceGetSamples": NOT_SUPPORTED}))
    _, gpu = utilisation(driver, device)
    assert [gpu.read() for _ in range(6)] == [64] * 6
    assert driver.num_calls("nvmlDeviceGetSamples") == 1
    assert not gpu.is_stale


@pytest.mark.parametrize("code", [NO_DATA, NOT_FOUND])
def test_a_buffer_that_has_nothing_yet_is_not_given_up_at_once(opened, code):
    driver, device = opened(FakeGpu(util=64, errors={"nvmlDeviceGetSamples": code}))
    clock, gpu = utilisation(driver, device)
    clock.pass_s(3600)  # however long ago it was made
    assert gpu.read() == 64
    driver.switch(Scenario([FakeGpu(util=Wave(2.0, 0.5, 0, 100))]))
    clock.pass_s(1.0)
    gpu.read()
    clock.pass_s(4.0)
    assert gpu.read() == pytest.approx(50, abs=10)


def test_neither_buffer_nor_rate_is_not_offered(opened):
    names = ["nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"]
    driver, device = opened(FakeGpu(errors=dict.fromkeys(names, NOT_SUPPORTED)))
    _, gpu = utilisation(driver, device)
    for _ in range(6):
        with pytest.raises(NotSupportedError, match="nvmlDeviceGetUtilizationRates"):
            gpu.read()


def test_a_buffer_that_has_answered_outlives_a_refusal(opened):
    driver, device = opened(FakeGpu(util=50))
    clock, gpu = utilisation(driver, device)
    gpu.read()
    driver.switch(Scenario([FakeGpu(util=50, errors={"nvmlDeviceGetSamples": NOT_SUPPORTED})]))
    for _ in range(6):
        clock.pass_s(1.0)
        assert gpu.read() == 50
    driver.switch(Scenario([FakeGpu(util=Wave(2.0, 0.5, 0, 100))]))
    clock.pass_s(1.0)
    gpu.read()
    clock.pass_s(4.0)
    assert gpu.read() == pytest.approx(50, abs=10)


def test_samples_that_stand_still_are_believed_for_a_while_only(opened):
    driver, device = opened(FakeGpu(util=Wave(100, 0.01, low=10, high=90), stale_samples=True))
    clock, gpu = utilisation(driver, device)
    assert gpu.read() == 90
    clock.pass_s(2)  # the wave is low now, the samples are of second 0 still
    assert gpu.read() == 10
    assert not gpu.is_stale
    clock.pass_s(STALE_S / 2)
    gpu.read()
    assert not gpu.is_stale
    clock.pass_s(STALE_S)
    assert gpu.read() == 10
    assert gpu.is_stale
    before = driver.num_calls("nvmlDeviceGetSamples")
    gpu.read()
    assert driver.num_calls("nvmlDeviceGetSamples") == before


def test_samples_of_long_ago_are_not_taken_for_the_present(opened):
    driver, device = opened(FakeGpu(util=Wave(1e6, 0.5, low=0, high=90), samples_lag_s=30))
    clock, gpu = utilisation(driver, device)
    assert gpu.read() == 90  # of the rate: the samples say 0
    for _ in range(8):
        clock.pass_s(1.0)
        assert gpu.read() == 90
    assert gpu.is_stale


def test_timestamps_of_another_epoch_count_by_their_order(opened):
    driver, device = opened(FakeGpu(util=Wave(2.0, 0.5, 0, 100)))
    clock, gpu = utilisation(driver, device)
    clock.epoch_s += 1e8
    gpu.read()
    clock.pass_s(4.0)
    assert gpu.read() == pytest.approx(50, abs=10)


def test_while_the_buffer_fails_the_rate_is_taken_and_the_buffer_asked_again(opened):
    driver, device = opened(FakeGpu(util=64, errors={"nvmlDeviceGetSamples": UNKNOWN}))
    clock, gpu = utilisation(driver, device)
    for _ in range(6):
        clock.pass_s(STALE_S)
        assert gpu.read() == 64
    assert driver.num_calls("nvmlDeviceGetSamples") == 6
    assert not gpu.is_stale


def test_a_device_that_is_lost_is_not_asked_for_its_rate(opened):
    driver, device = opened(FakeGpu(lost=Lost(from_s=10)))
    driver.advance(10)
    _, gpu = utilisation(driver, device)
    with pytest.raises(GpuLostError):
        gpu.read()
    assert driver.num_calls("nvmlDeviceGetUtilizationRates") == 0


# ---- Power ----


def test_power_is_the_mean_since_the_reading_before(opened):
    driver, device = opened(FakeGpu(power_w=Wave(1.0, 0.5, 100, 700), energy_start_j=1e6))
    meter = power(driver, device)
    first = meter.read()
    assert first == {"power_w": 700.0, "energy_j": 0.0}  # the sensor's
    for number in range(1, 4):
        driver.advance(10)
        figures = meter.read()
        assert figures["power_w"] == pytest.approx(400, rel=0.1)
        assert figures["energy_j"] == pytest.approx(4000 * number, rel=0.1)
    assert driver.num_calls("nvmlDeviceGetPowerUsage") == 1


def test_over_next_to_no_time_there_is_energy_and_no_power(opened):
    # The counter moves in steps: a step over some milliseconds would be kilowatts.
    driver, device = opened(FakeGpu(power_w=200))
    now_s = [0.0]
    meter = Power(device, now_s=lambda: now_s[0])
    meter.read()
    now_s[0] += POWER_WINDOW_S / 100
    driver.advance(1)
    figures = meter.read()
    assert set(figures) == {"energy_j"}
    assert figures["energy_j"] == pytest.approx(200, rel=0.2)
    assert meter.read()["energy_j"] >= figures["energy_j"]  # no time at all
    now_s[0] += 2 * POWER_WINDOW_S
    driver.advance(2 * POWER_WINDOW_S)
    assert meter.read()["power_w"] == pytest.approx(200, rel=0.2)


def test_without_a_counter_the_sensors_power_is_summed_up(opened):
    driver, device = opened(FakeGpu(power_w=300, has_energy=False))
    now_s = [0.0]
    meter = Power(device, now_s=lambda: now_s[0])
    assert meter.read() == {"power_w": 300, "energy_j": 0}
    now_s[0] = 4.0
    assert meter.read() == {"power_w": 300, "energy_j": 1200}
    for _ in range(3):
        now_s[0] += 0.5  # short ones count too
        figures = meter.read()
    assert figures == {"power_w": 300, "energy_j": 1200 + 3 * 150}
    assert driver.num_calls("nvmlDeviceGetTotalEnergyConsumption") == 1


def test_without_a_sensor_there_is_no_power_before_the_second_reading(opened):
    driver, device = opened(FakeGpu(power_w=300, errors={"nvmlDeviceGetPowerUsage": NOT_SUPPORTED}))
    meter = power(driver, device)
    assert meter.read() == {"energy_j": 0}
    driver.advance(10)
    assert meter.read()["power_w"] == pytest.approx(300, rel=0.1)


def test_neither_counter_nor_sensor_is_not_offered(opened):
    _, device = opened(FakeGpu(has_energy=False, errors={"nvmlDeviceGetPowerUsage": NO_PERMISSION}))
    meter = Power(device)
    for _ in range(6):
        with pytest.raises(NvmlAbsentError, match="nvmlDeviceGetPowerUsage: no permission"):
            meter.read()


def test_a_counter_that_goes_back_leaves_the_stretch_to_the_sensor(opened):
    driver, device = opened(FakeGpu(power_w=100, energy_start_j=10_000))
    meter = power(driver, device)
    meter.read()
    driver.switch(Scenario([FakeGpu(power_w=100, energy_start_j=0)]))
    for number in range(1, 4):
        driver.advance(10)
        figures = meter.read()
        assert figures["power_w"] == pytest.approx(100, rel=0.1)
        assert figures["energy_j"] == pytest.approx(1000 * number, rel=0.1)
    assert driver.num_calls("nvmlDeviceGetPowerUsage") == 2


@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN])
def test_a_counter_that_stumbles_makes_the_next_stretch_longer(opened, code):
    driver, device = opened(FakeGpu(power_w=Wave(1.0, 0.5, 100, 700)))
    meter = power(driver, device)
    meter.read()
    driver.advance(10)
    meter.read()
    driver.switch(
        Scenario([FakeGpu(power_w=Wave(1.0, 0.5, 100, 700), errors={"nvmlDeviceGetTotalEnergyConsumption": code})])
    )
    for _ in range(6):
        driver.advance(10)
        with pytest.raises(NvmlError, match="nvmlDeviceGetTotalEnergyConsumption"):
            meter.read()
    driver.switch(Scenario([FakeGpu(power_w=Wave(1.0, 0.5, 100, 700))]))
    driver.advance(10)
    figures = meter.read()
    assert figures["power_w"] == pytest.approx(400, rel=0.1)
    assert figures["energy_j"] == pytest.approx(400 * 10 * (2 + 6), rel=0.1)


def test_a_sensor_that_stumbles_loses_no_energy(opened):
    driver, device = opened(FakeGpu(power_w=300, has_energy=False))
    now_s = [0.0]
    meter = Power(device, now_s=lambda: now_s[0])
    meter.read()
    now_s[0] = 5.0
    failing = FakeGpu(power_w=300, has_energy=False, errors={"nvmlDeviceGetPowerUsage": UNKNOWN})
    driver.switch(Scenario([failing]))
    with pytest.raises(NvmlError, match="nvmlDeviceGetPowerUsage"):
        meter.read()
    driver.switch(Scenario([FakeGpu(power_w=300, has_energy=False)]))
    now_s[0] = 10.0
    assert meter.read() == {"power_w": 300, "energy_j": 3000}
