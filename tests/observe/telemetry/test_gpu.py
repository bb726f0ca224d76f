from itertools import pairwise

import pytest

from tests.fake_nvml.driver import (
    DRAM_ACTIVE,
    DRIVER_NOT_LOADED,
    FOREVER,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SM_ACTIVE,
    SM_OCCUPANCY,
    TENSOR_ACTIVE,
    UNKNOWN,
    Failing,
    FakeMig,
    Lost,
    Scenario,
    Wave,
)
from tests.kit.few import few
from tests.kit.watched import ONLY_PCIE, a100, h200
from wellfed.observe.nvml.gpm import FIGURES as GPM_FIGURES
from wellfed.observe.nvml.readings import CONFIRMING_TRIES
from wellfed.observe.nvml.session import NvmlAbsentError, NvmlSession
from wellfed.observe.telemetry.gpu import MOST_EVENTS, RETRY_S, WatchedGpu
from wellfed.observe.telemetry.metrics import GPU_METRICS

EVERY = {metric.name for metric in GPU_METRICS}
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


def test_gpus_are_told_apart_by_uuid(watch):
    scenario = Scenario([h200("GPU-1", temp_c=30), h200("GPU-2", temp_c=70, used_gib=9)])
    watched = watch(scenario, [WatchedGpu(0, "GPU-2"), WatchedGpu(3, "GPU-1")])
    found = watched.read()
    assert {gpu: figures["temp_c"] for gpu, figures in found.items()} == {0: 70, 3: 30}
    assert {gpu: figures["mem_used_gib"] for gpu, figures in found.items()} == {0: 9, 3: 5}


def test_fast_readings_leave_out_what_is_dear(watch):
    watched = watch(Scenario([a100()]))
    for _ in range(3):
        watched.later()
    names = ["nvmlDeviceGetPcieThroughput", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetClockInfo"]
    names += ["nvmlGpmQueryDeviceSupport", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetComputeRunningProcesses_v3"]
    before = [watched.driver.num_calls(name) for name in names]
    for _ in range(5):
        assert set(watched.later(0.5, slow=False)[0]) == {"util_pct", "mem_util_pct", "mem_used_gib"}
    assert [watched.driver.num_calls(name) for name in names] == before


def test_the_first_readings_ask_for_everything_also_when_gpm_has_the_rest(watch):
    # What GPM gives is not asked for elsewhere, and does not count as being found out yet.
    refusing = {"nvmlDeviceGetPcieThroughput": NO_PERMISSION}
    watched = watch(Scenario([h200(errors=refusing)]))
    assert "temp_c" in watched.read(slow=False)[0]
    watched.later(0.5, slow=False)
    watched.later(0.5, slow=False)
    assert set(watched.later(0.5, slow=False)[0]) == {"util_pct", "mem_util_pct", "mem_used_gib", *GPM_FIGURES}
    assert watched.events == []


def test_gpm_that_is_late_to_answer_is_not_forestalled(watch):
    # All else is found out before its first window is over; what it may give yet is not told to be absent.
    now_s = [0.0]
    watched = watch(Scenario([h200(errors={"nvmlDeviceGetPcieThroughput": NO_PERMISSION})]), now_s=lambda: now_s[0])
    for _ in range(3 + 1):
        assert "pcie_rx_mb_s" not in watched.read()[0]
    now_s[0] += 1.0
    assert set(GPM_FIGURES) <= set(watched.later(1.0)[0])
    assert watched.events == []


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


def test_power_over_a_swing_is_its_mean_and_not_a_glance(watch):
    watched = watch(Scenario([a100(power_w=Wave(1.0, 0.5, 100, 700))]))
    watched.read()
    powers = [watched.later(5.0)[0]["power_w"] for _ in range(5)]
    assert powers == [pytest.approx(400, rel=0.15)] * 5


# ---- What is refused ----


def test_pcie_without_permission_is_absent_and_told_once(watch):
    watched = watch(Scenario([a100(errors={"nvmlDeviceGetPcieThroughput": NO_PERMISSION})]))
    figures = [watched.later()[0] for _ in range(6)]
    assert all(EVERY - set(found) == GPM_ALONE | {"pcie_rx_mb_s", "pcie_tx_mb_s"} for found in figures)
    assert absent_of(watched)["no permission"] == ["pcie_rx_mb_s", "pcie_tx_mb_s"]
    assert watched.kinds() == ["metric_absent"] * 2
    assert watched.driver.num_calls("nvmlDeviceGetPcieThroughput") == 6  # two figures, three times each


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
    assert watched.events == [{"kind": "metric_absent", "gpu": 0, "metrics": ["sm_occupancy_pct"], "reason": ABSENT}]


def test_gpm_without_pcie_leaves_it_to_the_driver(watch):
    scales = dict.fromkeys((SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_ACTIVE), 1.0)
    watched = watch(Scenario([h200(gpm_scales=scales)]))
    watched.read()
    watched.later()
    assert watched.later()[0]["pcie_rx_mb_s"] == 1024 * 2
    assert watched.events == []


def test_gpm_that_refuses_everything_is_no_gpm(watch):
    watched = watch(Scenario([h200(gpm_scales={})]))
    for _ in range(5):
        figures = watched.later()[0]
    assert set(figures) == EVERY - GPM_ALONE
    assert set(absent_of(watched)[ABSENT]) == GPM_ALONE


def test_gpm_with_pcie_alone(watch):
    watched = watch(Scenario([h200(gpm_scales=ONLY_PCIE)]))
    watched.read()
    watched.later()
    assert set(watched.later(0.5, slow=False)[0]) >= {"pcie_rx_mb_s", "pcie_tx_mb_s"}
    assert set(absent_of(watched)[ABSENT]) == GPM_ALONE


def test_gpm_windows_are_not_shorter_than_its_counters_move(watch):
    now_s = [0.0]
    watched = watch(Scenario([h200()]), now_s=lambda: now_s[0])
    found = []
    for _ in range(20):
        found.append("sm_active_pct" in watched.later(0.03, slow=False)[0])
        now_s[0] += 0.03
    assert sum(found) == 6
    assert found[:5] == [False, False, False, False, True] or found[:4] == [False, False, False, True]


def test_gpm_samples_are_two_a_gpu_and_given_back(watch):
    watched = watch(Scenario([h200("GPU-1"), h200("GPU-2")]))
    for _ in range(4):
        watched.later(1.0)
        assert watched.driver.num_gpm_samples() == 4
    watched.source.close()
    assert (watched.driver.num_gpm_samples(), watched.driver.num_users()) == (0, 0)
    watched.source.close()


OLDER = [
    (["nvmlDeviceGetTotalEnergyConsumption"], set()),
    (["nvmlDeviceGetSamples"], set()),
    (["nvmlDeviceGetTemperatureV"], set()),
    (["nvmlDeviceGetCurrentClocksEventReasons"], set()),
    (["nvmlDeviceGetMemoryInfo_v2"], set()),
    (["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"], GPM_ALONE),
    (["nvmlGpmMetricsGet"], GPM_ALONE),
    (["nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"], {"temp_c"}),
    (
        ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
        {"power_limited", "heat_limited"},
    ),
    (["nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"], {"util_pct", "mem_util_pct"}),
]


@pytest.mark.parametrize(("missing", "absent"), few(OLDER, 4), ids=lambda names: min(names, default=""))
def test_an_older_driver_gives_what_it_can(watch, fake_driver, missing, absent):
    watched = watch(Scenario([h200()]), driver=fake_driver.without(*missing))
    for _ in range(4):
        figures = watched.later()[0]
    assert EVERY - set(figures) == absent
    assert figures["energy_j"] == pytest.approx(350.5 * 15, rel=0.1)
    told = absent_of(watched)
    assert {name for names in told.values() for name in names} == absent
    assert set(told) <= {"function not found in this driver"}
    assert watched.kinds() == ["metric_absent"] * bool(absent)
    if "temp_c" in figures:
        assert (figures["temp_c"], figures.get("power_limited", 1)) == (55, 1)


def test_mig_instances_have_memory_and_gpm_and_no_utilisation(watch):
    instances = [
        FakeMig("MIG-1", used_gib=2, gpu_instance_id=7, util=20),
        None,
        FakeMig("MIG-2", used_gib=3, gpu_instance_id=9, util=80),
    ]
    watched = watch(
        Scenario([h200(mig=instances)]), [WatchedGpu(0, "MIG-1", is_mig=True), WatchedGpu(1, "MIG-2", is_mig=True)]
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


def test_what_is_refused_is_known_after_the_first_reading(watch):
    watched = watch(Scenario([a100(errors={"nvmlDeviceGetTemperatureV": 3, "nvmlDeviceGetTemperature": 3})]))
    watched.read(slow=False)
    assert {"temp_c", *GPM_ALONE} == set(absent_of(watched)[ABSENT])
    calls = watched.driver.num_calls("nvmlDeviceGetTemperature")
    watched.later()
    assert watched.driver.num_calls("nvmlDeviceGetTemperature") == calls


def test_at_an_edge_only_energy_is_asked_for(watch):
    watched = watch(Scenario([h200()]))
    watched.read()
    calls = watched.driver.num_calls("nvmlDeviceGetMemoryInfo_v2")
    watched.driver.advance(2.0)
    assert set(watched.read(slow=False, edge=True)[0]) == {"power_w", "energy_j"}
    assert watched.driver.num_calls("nvmlDeviceGetMemoryInfo_v2") == calls


# ---- Buffered utilisation ----


def test_stale_samples_are_noticed_and_told_once(watch):
    watched = watch(Scenario([a100(util=Wave(40, 0.5, 10, 90), stale_samples=True)]))
    found = [watched.later(1.0, slow=False)[0]["util_pct"] for _ in range(35)]
    assert found[-1] == 10  # the latest rate, while the samples still say 90
    assert watched.kinds().count("stale") == 1
    calls = watched.driver.num_calls("nvmlDeviceGetSamples")
    watched.later(1.0, slow=False)
    assert watched.driver.num_calls("nvmlDeviceGetSamples") == calls


def test_samples_that_lag_are_not_taken_for_the_present(watch):
    now_s = [0.0]
    watched = watch(Scenario([a100(util=Wave(1e6, 1e-6, 0, 90), samples_lag_s=30)]), now_s=lambda: now_s[0])
    watched.read()
    watched.driver.advance(2)  # the wave is low now, and was at the time of the samples too: so tell them apart
    watched.driver.switch(Scenario([a100(util=33, samples_lag_s=30)]))
    for _ in range(10):
        now_s[0] += 1.0
        assert watched.read()[0]["util_pct"] == 33
    assert watched.kinds().count("stale") == 1


# ---- Lost GPUs ----


@pytest.mark.parametrize("needs_init", [False, True])
def test_a_gpu_that_is_lost_comes_back_and_the_other_goes_on(watch, needs_init):
    lost = h200("GPU-2", lost=Lost(20, 41, needs_init=needs_init))
    watched = watch(Scenario([h200("GPU-1"), lost]))
    seen = [sorted(watched.later(1.0)) for _ in range(80)]
    assert all(0 in gpus for gpus in seen)
    gone = [second for second, gpus in enumerate(seen, 1) if 1 not in gpus]
    assert 19 <= gone[0] <= 21
    assert 40 <= gone[-1] <= 41 + RETRY_S
    assert gone == list(range(gone[0], gone[-1] + 1))
    assert watched.kinds() == ["gpu_lost", "gpu_back"]
    assert "GPU is lost" in watched.events[0]["message"]
    assert [event["gpu"] for event in watched.events] == [1, 1]
    figures = watched.later()[1]
    assert set(figures) == EVERY
    # The counter went on while nobody could ask.
    assert figures["energy_j"] == pytest.approx(350.5 * (watched.driver.elapsed_s() - 1), rel=0.05)


def test_a_gpu_is_not_back_while_only_its_handle_is(watch):
    away = dict.fromkeys(["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUUID"], Failing(15, 20, 70))
    watched = watch(Scenario([h200(errors=away)]))
    watched.later(15)
    watched.later(1)
    watched.later(5)
    for _ in range(70):
        watched.later(1.0)
    assert watched.kinds() == ["gpu_lost", "gpu_back"]


def test_a_gpu_lost_for_good_is_told_of_once_and_asked_for_now_and_then(watch):
    watched = watch(Scenario([h200("GPU-1"), h200("GPU-2", lost=Lost(5))]))
    seen = [sorted(watched.later(1.0)) for _ in range(100)]
    assert seen[-1] == [0]
    assert watched.kinds() == ["gpu_lost"]
    assert watched.driver.num_calls("nvmlInitWithFlags") == 4  # at the start, and 10, 30 and 70 s after the loss
    assert watched.driver.num_users() == 1


def test_a_gpu_that_comes_and_goes_is_told_of_a_few_times(watch):
    bounces = [Failing(15, second, second + 5) for second in range(20, 600, 40)]
    watched = watch(
        Scenario([a100(gpm=False, errors=dict.fromkeys(["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUUID"], bounces))])
    )
    for _ in range(600):
        watched.later(1.0, slow=False)
    assert watched.kinds().count("gpu_lost") == MOST_EVENTS == 5
    assert watched.kinds().count("gpu_back") == MOST_EVENTS


def test_the_only_gpu_lost_while_the_driver_refuses_everyone(watch):
    refusing = []

    def load():
        if refusing:
            raise NvmlAbsentError("nvmlInit", "driver not loaded")
        return __import__("pynvml")

    watched = watch(Scenario([h200(lost=Lost(20, 30))]), session=lambda: NvmlSession(load))
    watched.read()
    refusing.append(True)
    seen = [bool(watched.later(1.0)) for _ in range(60)]
    assert not any(seen[20:])
    refusing.clear()
    seen = [bool(watched.later(1.0)) for _ in range(40)]
    assert seen[-1]
    assert watched.kinds() == ["gpu_lost", "gpu_back"]


def test_energy_never_goes_back(watch):
    watched = watch(Scenario([a100(energy_start_j=5000)]))
    watched.read()
    before_j = watched.later()[0]["energy_j"]
    watched.driver.switch(Scenario([a100(energy_start_j=0)]))  # the driver was reset
    after_j = watched.later()[0]["energy_j"]
    assert after_j - before_j == pytest.approx(350.5 * 5, rel=0.1)
    assert watched.later()[0]["energy_j"] - after_j == pytest.approx(350.5 * 5, rel=0.1)


# ---- Drivers in trouble ----


@pytest.mark.parametrize("code", [UNKNOWN, NOT_SUPPORTED])
def test_a_driver_that_stumbles_now_and_then_costs_a_figure_now_and_then(watch, code):
    # Two of them and readings that differ, or it would be the same call that fails each time.
    watched = watch(Scenario([h200("GPU-1"), h200("GPU-2")], fail_every=7, fail_code=code))
    found = [watched.later(1.0, slow=number % 5 in (0, 3, 4)).get(0, {}) for number in range(200)]
    slow = [figures for number, figures in enumerate(found) if number % 5 in (0, 3, 4)]
    for metric in GPU_METRICS:
        figures = found if metric.rate == "fast" else slow
        times = [metric.name in figures for figures in figures]
        assert sum(times) >= 0.6 * len(times), metric.name
        assert any(times[-7:]), metric.name
    powers = [figures["power_w"] for figures in slow if "power_w" in figures]
    assert powers == [pytest.approx(350.5, rel=0.5)] * len(powers)
    energies_j = [figures["energy_j"] for figures in slow if "energy_j" in figures]
    assert energies_j == sorted(energies_j)
    assert energies_j[-1] == pytest.approx(350.5 * 199, rel=0.1)
    assert watched.kinds() == ["errors", "errors"]
    # Buffer and counter were not given up for a single refusal.
    assert watched.driver.num_calls("nvmlDeviceGetSamples") > 1000
    assert watched.driver.num_calls("nvmlDeviceGetPowerUsage") < 20


@pytest.mark.parametrize("code", [3, 4, 15, 999])
@pytest.mark.parametrize("every", [3, 4, 5, 7, 11])
def test_no_figure_and_no_gpu_is_given_up_for_a_driver_that_stumbles(watch, code, every):
    watched = watch(Scenario([h200()], fail_every=every, fail_code=code))
    for number in range(40):
        watched.later(1.0, slow=number % 5 == 0)
    assert watched.kinds() in (["errors"], [])
    watched.driver.switch(Scenario([h200()]))
    assert set(watched.later()[0]) == EVERY


def test_a_figure_that_always_fails_is_missing_and_told_once(watch):
    watched = watch(Scenario([h200(errors={"nvmlDeviceGetTemperatureV": UNKNOWN})]))
    watched.read()
    for _ in range(5):
        assert EVERY - set(watched.later()[0]) == {"temp_c"}
    (event,) = watched.events
    assert (event["kind"], event["trouble"], event["gpu"]) == ("telemetry_trouble", "errors", 0)
    assert event["message"] == (
        "NVML nvmlDeviceGetTemperatureV: unknown error. Where a call fails its figure is missing."
    )


def test_a_driver_that_refuses_to_open_is_told_of_once_and_asked_less_and_less(watch):
    watched = watch(Scenario([h200(), h200("GPU-2")], init_error=DRIVER_NOT_LOADED))
    for _ in range(30):
        assert watched.later() == {}
    (event,) = watched.events
    assert (event["kind"], event["trouble"]) == ("telemetry_trouble", "refused")
    assert event["message"] == "NVML nvmlInit: driver not loaded. GPU figures are absent."
    assert watched.driver.num_calls("nvmlInitWithFlags") == 4 * CONFIRMING_TRIES  # in 150 s


@pytest.mark.parametrize("errors", [{}, {"nvmlDeviceGetHandleByUUID": NO_PERMISSION}], ids=["unknown", "refused"])
def test_a_gpu_that_cannot_be_found_leaves_the_others(watch, errors):
    uuid = "GPU-2" if errors else "GPU-3"
    scenario = Scenario([h200("GPU-1"), h200("GPU-2", errors=errors)])
    watched = watch(scenario, [WatchedGpu(0, uuid), WatchedGpu(1, "GPU-1")])
    for _ in range(30):
        assert sorted(watched.later(1.0)) == [1]
    (event,) = watched.events
    assert (event["kind"], event["gpu"]) == ("gpu_lost", 0)
    assert ("no permission" if errors else "not found") in event["message"]


def test_a_gpu_whose_memory_is_not_offered_comes_back_too(watch):
    shared = dict.fromkeys(["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"], NOT_SUPPORTED)
    watched = watch(Scenario([h200(errors=shared, lost=Lost(20, 25))]))
    for _ in range(40):
        figures = watched.later(1.0)
    assert set(figures[0]) == EVERY - {"mem_used_gib"}
    assert watched.kinds() == ["metric_absent", "gpu_lost", "gpu_back"]


def test_nothing_to_open_is_nothing_to_close(watch):
    watched = watch(Scenario([h200()], errors={"nvmlDeviceGetCount_v2": Failing(UNKNOWN, 0, FOREVER)}))
    watched.source.close()
    assert watched.driver.num_calls("nvmlShutdown") == 0
