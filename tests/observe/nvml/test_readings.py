from contextlib import ExitStack

import pytest

from tests.fake_nvml.driver import (
    FakeGpu,
    Scenario,
    Wave,
)
from wellfed.observe.nvml.readings import (
    OpenDevice,
    Power,
    clock_limits,
    memory_used_gib,
    utilisation,
)
from wellfed.observe.nvml.session import NvmlError, NvmlSession


@pytest.fixture
def opened(fake_driver):
    """``opened(gpu)`` is (driver, device); the scenario of the driver takes ``options``."""
    with ExitStack() as stack:

        def begin(gpu, driver=fake_driver, **options):
            loaded = stack.enter_context(driver.load(Scenario([gpu], **options)))
            return loaded, OpenDevice(gpu.uuid, stack.enter_context(NvmlSession()))

        yield begin


def power(driver, device):
    """On the driver's own clock, so that energy and time go together."""
    return Power(device, now_s=driver.elapsed_s)


# ---- Devices ----


def test_a_device_is_found_by_uuid_not_by_number(fake_driver):
    with fake_driver.load(Scenario([FakeGpu("GPU-1", temp_c=30), FakeGpu("GPU-2", temp_c=60)])), NvmlSession() as nvml:
        assert OpenDevice("GPU-2", nvml).number("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU") == 60
        with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID"):
            OpenDevice("GPU-3", nvml)


# ---- Single figures ----


def test_memory_is_without_the_drivers_reserve(opened):
    _, device = opened(FakeGpu(used_gib=3, reserved_gib=0.5))
    assert memory_used_gib(device) == 3


@pytest.mark.parametrize(
    ("bits", "limits"),
    [
        (0x0, (False, False)),
        (0x4, (True, False)),  # power cap
        (0x8, (False, False)),  # hardware slowdown of either cause: another bit says which
        (0x20, (False, True)),  # temperature, by software
        (0x1 | 0x4 | 0x20, (True, True)),
    ],
)
def test_what_holds_the_clocks_down(opened, bits, limits):
    _, device = opened(FakeGpu(event_reasons=bits))
    assert tuple(clock_limits(device).values()) == limits


def test_utilisation_is_the_drivers_latest(opened):
    _, device = opened(FakeGpu(util=64, memory_util=12))
    assert utilisation(device) == {"util_pct": 64, "mem_util_pct": 12}


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
