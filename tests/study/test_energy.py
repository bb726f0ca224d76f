"""A sweep for samples per joule is refused where no joules can be measured."""

import pytest

from tests.fake_nvml.driver import NOT_SUPPORTED, FakeDriver, FakeGpu, Scenario
from wellfed.config.compose import compose
from wellfed.errors import ConfigError
from wellfed.study.request import check_energy

ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
POWER = "nvmlDeviceGetPowerUsage"
JOULES = "sweep.objective=samples_per_joule"


def refusal(*overrides: str, axes: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as raised:
        check_energy(compose(["logger=none", *overrides]).config, axes)
    return str(raised.value)


def test_without_nvml_it_is_refused_with_a_way_out(fake_driver: FakeDriver) -> None:
    with fake_driver.load(Scenario(init_error=9)):
        told = refusal(JOULES)
    assert f"{JOULES}: energy can't be measured here: NVML: driver not loaded." in told
    assert "python -m wellfed doctor says more, or sweep.objective=samples_per_s." in told


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["telemetry=none"], "nothing is watched with telemetry.enabled=false. Set telemetry.enabled=true, or"),
        (["trainer.accelerator=cpu"], "nothing here measures the energy of a processor. Set trainer.accelerator=gpu"),
    ],
)
def test_trials_that_would_have_no_figure_are_refused(overrides: list[str], words: str) -> None:
    assert words in refusal(JOULES, *overrides)


def test_a_card_that_tells_neither_energy_nor_power_is_refused(fake_driver: FakeDriver) -> None:
    mute = FakeGpu("GPU-2", "NVIDIA Mute", has_energy=False, errors={ENERGY: NOT_SUPPORTED, POWER: NOT_SUPPORTED})
    with fake_driver.load(Scenario([FakeGpu("GPU-1"), mute])):
        assert "NVIDIA Mute tells neither energy nor power (not supported by this device)" in refusal(JOULES)


@pytest.mark.parametrize("errors", [{}, {ENERGY: NOT_SUPPORTED}, {POWER: NOT_SUPPORTED}])
def test_a_card_that_tells_one_of_both_will_do(fake_driver: FakeDriver, errors: dict[str, int]) -> None:
    with fake_driver.load(Scenario([FakeGpu("GPU-1", errors=errors)])):
        check_energy(compose([JOULES, "logger=none"]).config, ())


def test_other_objectives_ask_for_nothing(fake_driver: FakeDriver) -> None:
    with fake_driver.load(Scenario(init_error=9)):
        for name in ("samples_per_s", "peak_memory"):
            check_energy(compose([f"sweep.objective={name}", "telemetry=none", "logger=none"]).config, ())
