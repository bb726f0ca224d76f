from itertools import pairwise

import pytest

from tests.fake_nvml.driver import (
    DRIVER_NOT_LOADED,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SM_OCCUPANCY,
    UNKNOWN,
    FakeMig,
    Lost,
    Scenario,
    Wave,
)
from tests.kit.watched import a100, h200, watched_gpu
from wellfed.observe.nvml.gpm import FIGURES as GPM_FIGURES
from wellfed.observe.telemetry.metrics import GPU_METRICS, SLOW_METRICS

EVERY = {*GPU_METRICS}
GPM_ALONE = {"sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct"}
ABSENT = "not supported by this device"


def absent_of(watched):
    """Reason -> names, of all events of that kind."""
    told = [event for event in watched.events if event["kind"] == "metric_absent"]
    return {event["reason"]: event["metrics"] for event in told}


# ---- Figures ----


def test_every_figure_of_a_fully_equipped_gpu(watch):
    watched = watch(Scenario([h200()]))
    watched.read()
    figures = watched.later(8.0)[0]
    assert figures.pop("energy_j") == pytest.approx(350.5 * 8, rel=0.1)
    assert figures.pop("power_w") == pytest.approx(350.5, rel=0.1)
    assert figures == pytest.approx(
        {
            **{"util_pct": 60, "mem_util_pct": 35, "mem_used_gib": 5, "temp_c": 55},
            **{"sm_active_pct": 60, "sm_occupancy_pct": 30, "tensor_active_pct": 15, "dram_active_pct": 45},
            **{"pcie_rx_mb_s": 2048, "pcie_tx_mb_s": 307.2},  # GPM counts in MiB/s, the scenario in kB/s
            **{"sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "power_limited": 1, "heat_limited": 0},
        }
    )
    assert watched.events == []


def test_without_gpm_pcie_is_the_drivers_and_the_rest_is_absent(watch):
    watched = watch(Scenario([a100()]))
    watched.read()
    watched.later()
    figures = watched.later()[0]
    assert set(figures) == EVERY - GPM_ALONE
    assert (figures["pcie_rx_mb_s"], figures["pcie_tx_mb_s"]) == (2048, 307.2)
    (event,) = watched.events
    assert event == {"kind": "metric_absent", "gpu": 0, "metrics": list(GPM_FIGURES)[:4], "reason": ABSENT}


def test_fast_readings_leave_out_what_is_dear(watch):
    watched = watch(Scenario([a100()]))
    for _ in range(3):
        watched.later()
    names = ["nvmlDeviceGetPcieThroughput", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetClockInfo"]
    names += ["nvmlGpmQueryDeviceSupport", "nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses_v3"]
    before = [watched.driver.num_calls(name) for name in names]
    for _ in range(5):
        assert set(watched.later(0.5, slow=False)[0]) == {"util_pct", "mem_util_pct", "mem_used_gib"}
    assert [watched.driver.num_calls(name) for name in names] == before


def test_a_swing_of_nine_and_a_half_seconds_is_seen_as_one(watch):
    watched = watch(Scenario([h200(util=Wave(9.5, duty_frac=0.5, low=20, high=95))]))
    watched.read()
    curves = {"util_pct": [], "sm_active_pct": []}
    for _ in range(120):  # a minute
        figures = watched.later(0.5, slow=False)[0]
        for name, curve in curves.items():
            curve.append(figures[name] > 57.5)
    for name, curve in curves.items():
        rises = [0.5 * at for at in range(1, len(curve)) if curve[at] and not curve[at - 1]]
        gaps_s = [after - before for before, after in pairwise(rises)]
        assert len(gaps_s) >= 4, name
        assert sum(gaps_s) / len(gaps_s) == pytest.approx(9.5, abs=0.5), name


# ---- What is refused ----


@pytest.mark.parametrize(
    ("gpu", "given"),
    [
        (a100(errors={"nvmlDeviceGetPowerUsage": NOT_SUPPORTED}), {"power_w", "energy_j"}),
        (a100(has_energy=False), {"power_w", "energy_j"}),
        (a100(has_energy=False, errors={"nvmlDeviceGetPowerUsage": NOT_SUPPORTED}), set()),
    ],
    ids=["counter", "sensor", "neither"],
)
def test_power_from_what_there_is(watch, gpu, given):
    watched = watch(Scenario([gpu]))
    watched.read()
    watched.later()
    figures = watched.later()[0]
    assert {"power_w", "energy_j"} & set(figures) == given
    told = [name for names in absent_of(watched).values() for name in names]
    assert {"power_w", "energy_j"} & set(told) == {"power_w", "energy_j"} - given
    if given:
        assert figures["power_w"] == pytest.approx(350.5, rel=0.1)
        assert figures["energy_j"] == pytest.approx(350.5 * 10, rel=0.1)


def test_one_gpm_metric_that_is_refused_is_absent_alone(watch):
    watched = watch(Scenario([h200(gpm_errors={SM_OCCUPANCY: NOT_SUPPORTED})]))
    watched.read()
    for _ in range(3):
        figures = watched.later(1.0)[0]
    assert set(figures) == EVERY - {"sm_occupancy_pct"}
    assert watched.events == []


def test_gpm_samples_are_two_a_gpu_and_given_back(watch):
    watched = watch(Scenario([h200("GPU-1"), h200("GPU-2")]))
    for _ in range(4):
        watched.later(1.0)
        assert watched.driver.num_gpm_samples() == 4
    watched.source.close()
    assert (watched.driver.num_gpm_samples(), watched.driver.num_users()) == (0, 0)
    watched.source.close()


def test_mig_instances_have_memory_and_gpm_and_no_utilisation(watch):
    instances = [
        FakeMig("MIG-1", used_gib=2, gpu_instance_id=7, util=20),
        None,
        FakeMig("MIG-2", used_gib=3, gpu_instance_id=9, util=80),
    ]
    watched = watch(
        Scenario([h200(mig=instances)]), [watched_gpu(0, "MIG-1", is_mig=True), watched_gpu(1, "MIG-2", is_mig=True)]
    )
    for _ in range(3):
        found = watched.later()
    expected = {"mem_used_gib": (2, 3), "sm_active_pct": (20, 80), "dram_active_pct": (15, 60)}
    for name, figures in expected.items():
        assert (found[0][name], found[1][name]) == pytest.approx(figures), name
    assert set(found[0]) == {"mem_used_gib", *GPM_FIGURES}
    told = [event for event in watched.events if event["gpu"] == 0]
    assert [event["kind"] for event in told] == ["metric_absent"]
    assert set(told[0]["metrics"]) == EVERY - set(found[0])


# ---- Drivers in trouble ----


def test_a_driver_that_stumbles_now_and_then_costs_a_figure_now_and_then(watch):
    # Two of them and readings that differ, or it would be the same call that fails each time.
    watched = watch(Scenario([h200("GPU-1"), h200("GPU-2")], fail_every=7, fail_code=UNKNOWN))
    found = [watched.later(1.0, slow=number % 5 in (0, 3, 4)).get(0, {}) for number in range(200)]
    slow = [figures for number, figures in enumerate(found) if number % 5 in (0, 3, 4)]
    for name in GPU_METRICS:
        times = [name in figures for figures in (slow if name in SLOW_METRICS else found)]
        assert sum(times) >= 0.6 * len(times), name
        assert any(times[-7:]), name
    powers = [figures["power_w"] for figures in slow if "power_w" in figures]
    assert powers == [pytest.approx(350.5, rel=0.5)] * len(powers)
    energies_j = [figures["energy_j"] for figures in slow if "energy_j" in figures]
    assert energies_j == sorted(energies_j)
    assert energies_j[-1] == pytest.approx(350.5 * 199, rel=0.1)
    assert watched.kinds() == ["errors", "errors"]
    # The counter was not given up for a single refusal.
    assert watched.driver.num_calls("nvmlDeviceGetPowerUsage") < 20


def test_a_driver_that_refuses_to_open_is_reported_once(watch):
    watched = watch(Scenario([h200(), h200("GPU-2")], init_error=DRIVER_NOT_LOADED))
    for _ in range(30):
        assert watched.later() == {}
    (event,) = watched.events
    assert (event["kind"], event["trouble"]) == ("telemetry_trouble", "refused")
    assert event["message"] == "NVML nvmlInit: driver not loaded. GPU figures are absent."
    assert watched.driver.num_calls("nvmlInitWithFlags") == 1


@pytest.mark.parametrize("errors", [{}, {"nvmlDeviceGetHandleByUUID": NO_PERMISSION}], ids=["unknown", "refused"])
def test_a_gpu_that_cannot_be_found_leaves_the_others(watch, errors):
    uuid = "GPU-2" if errors else "GPU-3"
    scenario = Scenario([h200("GPU-1"), h200("GPU-2", errors=errors)])
    watched = watch(scenario, [watched_gpu(0, uuid), watched_gpu(1, "GPU-1")])
    for _ in range(30):
        assert sorted(watched.later(1.0)) == [1]
    (event,) = watched.events
    assert (event["kind"], event["gpu"]) == ("gpu_lost", 0)
    assert ("no permission" if errors else "not found") in event["message"]


def test_a_lost_gpu_is_reported_once_and_the_other_goes_on(watch):
    watched = watch(Scenario([h200("GPU-1"), h200("GPU-2", lost=Lost(5))]))
    seen = [sorted(watched.later(1.0)) for _ in range(20)]
    assert seen[0] == [0, 1]
    assert seen[-1] == [0]
    (event,) = watched.events
    assert (event["kind"], event["gpu"]) == ("gpu_lost", 1)
    assert "GPU is lost" in event["message"]
