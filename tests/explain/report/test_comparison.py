"""Two runs side by side: what differs, ratios with their intervals, and what keeps figures from being compared."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.evidence_of import evidence
from wellfed.explain.report.comparison import Compared, Comparison, Estimate, Ratio
from wellfed.observe.telemetry.machines import HOST

FIGURES = st.floats(1e-3, 1e6)
SHARES = st.floats(0, 0.9)


def both(a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> Comparison:
    """Two runs of the same workload, changed."""
    same = {"workload": "recsys", "seed": 1}
    return Comparison(evidence(**same | (a or {})), evidence(**same | (b or {})))


def differing(found: list[Compared]) -> list[tuple[str, ...]]:
    return [(one.name, *one.shown) for one in found]


def shown(found: Comparison) -> dict[str, list[str]]:
    return {one.name: [*one.shown, str(one.ratio or "")] for one in found.figures}


@given(FIGURES, FIGURES, SHARES, SHARES)
def test_a_ratio_is_within_its_interval_and_turns_over_with_its_runs(a: float, b: float, da: float, db: float) -> None:
    one, other = Estimate(a, (a * (1 - da), a * (1 + da))), Estimate(b, (b * (1 - db), b * (1 + db)))
    ratio, turned = Ratio.of(one, other), Ratio.of(other, one)
    assert ratio is not None
    assert turned is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low <= ratio.factor * (1 + 1e-9)
    assert ratio.factor <= ratio.high * (1 + 1e-9)
    inverse = turned.inverse
    assert (inverse.factor, inverse.low, inverse.high) == pytest.approx((ratio.factor, ratio.low, ratio.high))


def test_the_interval_of_a_ratio_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(1000):
        means = [random.normal(mean, 0.05 * mean) for mean in (10.0, 13.0)]
        halves = [1.96 * 0.05 * mean for mean in (10.0, 13.0)]
        ratio = Ratio.of(
            *(Estimate(mean, (mean - half, mean + half)) for mean, half in zip(means, halves, strict=True))
        )
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 1.3 <= ratio.high
    assert 0.93 <= held / 1000 <= 0.97


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_not_above_zero_has_no_ratio(value: float) -> None:
    assert Ratio.of(Estimate(1.0), Estimate(value)) is None
    assert Ratio.of(Estimate(value), Estimate(1.0)) is None
    assert Ratio.of(None, Estimate(1.0)) is None


def test_without_both_intervals_a_ratio_has_none() -> None:
    assert str(Ratio.of(Estimate(1.0, (0.9, 1.1)), Estimate(2.0))) == "2.0 times"
    assert str(Ratio(0.0001)) == "under 0.01 times"


def test_an_interval_down_to_zero_leaves_the_ratio_open_on_one_side() -> None:
    wide, narrow = Estimate(1.0, (0.0, 2.0)), Estimate(2.0, (1.9, 2.1))
    assert str(Ratio.of(wide, narrow)) == "not told apart (1.00 or more)"
    assert str(Ratio.of(wide, Estimate(4.0, (3.9, 4.1)))) == "4.0 times (2.0 or more)"
    assert str(Ratio.of(narrow, wide)) == "not told apart (0.00 to 1.00)"
    assert str(Ratio.of(wide, wide)) == "not told apart (0.00 or more)"
    turned = Ratio.of(Estimate(4.0, (3.9, 4.1)), wide)
    assert turned is not None
    assert str(turned.inverse) == "4.0 times (2.0 or more)"


def test_a_rate_that_may_be_anything_is_not_told_apart() -> None:
    found = both()
    throughput = found.a.record.throughput
    assert throughput is not None
    throughput["ci95"] = [0.0, 66_515.0]
    assert found.verdict.startswith("The rates are not told apart: that of B is 1.00 times that of A (95 % interval 0.")
    assert found.verdict.endswith(" or more).")


def test_the_faster_run_is_named_with_the_interval() -> None:
    found = both({"wait_ms": 10.1})
    assert found.verdict == "B trains 2.0 times as fast as A (95 % interval 1.94 to 2.1)."
    assert Comparison(found.b, found.a).verdict == "A trains 2.0 times as fast as B (95 % interval 1.94 to 2.1)."
    rows = shown(found)
    assert rows["rate"] == [
        "6,337 samples/s (6,210 to 6,463)",
        "12,673 samples/s (12,420 to 12,927)",
        "2.0 times (1.94 to 2.1)",
    ]
    assert rows["wait, of the mean step"] == ["10.10 ms, 50.0 %", "0.00 ms, 0.0 %", ""]
    assert rows["compute, of the mean step"] == [
        "10.00 ms, 49.5 %",
        "10.00 ms, 99.0 %",
        "not told apart (1.00 to 1.00)",
    ]
    assert "copy, of the mean step" not in rows
    assert (rows["step, mean"], rows["step, median"]) == (["20.20 ms", "10.10 ms", ""], ["20.20 ms", "10.10 ms", ""])


@pytest.mark.parametrize("every", [1, 4])
def test_time_and_share_of_a_phase_are_of_the_same_steps(every: int) -> None:
    """Steps are longer while their phases are not timed, by chance or because others used the machine."""
    is_timed = np.arange(400) % every == 0
    compute_ms = np.where(is_timed, 10.0, 20.0)
    each = {"device_forward_ms": 3.0, "device_backward_ms": 5.0, "device_optimizer_ms": 1.0}
    columns = {name: np.where(is_timed, ms, np.nan) for name, ms in each.items()}
    mean_ms = float(compute_ms.mean())
    made = {"steps": 400, "copy_ms": 0.0, "host_ms": 0.0, "compute_ms": mean_ms}
    found = both(*({**made, "columns": {**columns, "compute_ms": compute_ms}} for _ in "ab"))
    for record in found.records:
        assert record.time is not None
        record.time |= {"forward_frac": 0.3, "backward_frac": 0.5, "optimizer_frac": 0.1}
    row = shown(found)["forward, of the mean step"]
    assert row == 2 * [f"{0.3 * mean_ms:.2f} ms, 30.0 %"] + ["not told apart (1.00 to 1.00)"]


def test_what_chance_could_have_made_is_not_told_apart() -> None:
    found = both({"compute_ms": 10.1})
    assert found.verdict.startswith(
        "The rates are not told apart: that of B is 1.01 times that of A (95 % interval 0.98"
    )
    assert shown(found)["rate"][2] == "not told apart (0.98 to 1.04)"


def test_too_few_steps_are_no_proof() -> None:
    found = both()
    for record in found.records:
        record.throughput = {**record.throughput, "ci95": None}  # type: ignore[typeddict-item]
    assert found.verdict == "B trains 1.00 times as fast as A; too few steps to tell that from chance."
    assert "A has too few steps for an interval of its rate." in found.caveats


def test_runs_without_rates_are_told_so() -> None:
    found = both({"throughput": None, "status": "oom", "time": None, "columns": {"step": []}})
    assert found.verdict == "There are no two rates to compare."
    assert "A ended as oom: its figures are those until then." in found.caveats


@pytest.mark.parametrize(
    ("b", "caveat"),
    [
        ({"seed": 2}, "Different seeds, 1 and 2: metrics differ by chance, too."),
        ({"status": "running"}, "B still runs: its figures are those until then."),
        (
            {"workload": "forecast"},
            "Different workloads, recsys and forecast: rates, times and metrics are of different",
        ),
        ({"machine": {"cpu": "another"}}, "Different devices, a CPU and another: settings are not all that differs."),
        (
            {"config": {"workload": {"lr": 2}}},
            "What is learned differs (workload.lr): times and metrics are of different",
        ),
    ],
)
def test_what_keeps_figures_from_being_compared_is_said(b: dict[str, Any], caveat: str) -> None:
    found = both({"machine": {"cpu": "a CPU"}, "config": {"workload": {"lr": 1}}}, b)
    assert any(line.startswith(caveat) for line in found.caveats), found.caveats


def test_other_units_have_no_ratio() -> None:
    found = both()
    throughput = found.b.record.throughput
    assert throughput is not None
    throughput["sample_unit"] = "images"
    assert found.verdict == "Their rates have no ratio."
    assert found.caveats == ["Samples are samples in A and images in B: rates have no ratio."]
    assert shown(found)["rate"][2] == ""


def test_settings_plan_machine_and_metrics_are_compared_one_by_one() -> None:
    found = both(
        {"config": {"loader": {"backend": "auto", "n": 1}}, "plan": {"loader.backend": "threads", "same": 1}},
        {
            "config": {"loader": {"backend": "auto", "n": None}},
            "plan": {"loader.backend": "inline", "same": 1, "new": 2},
        },
    )
    a, b = found.records
    a.metrics, b.metrics = {"val/x": 0.5, "val/gone": 1.0}, {"val/x": None}  # type: ignore[dict-item]
    a.machine = {"versions": {"torch": "2.12"}, "gpus": [{"name": "Card"}], "cpu": "same"}
    b.machine = {"versions": {"torch": "2.13"}, "cpu": "same"}
    a.git, b.git = (
        {"commit": 2 * f"{letter}0123456", "dirty": letter == "b", "changed": [], "digest": ""} for letter in "ab"
    )
    assert differing(found.settings) == [("loader.n", "1", "null")]
    assert [(one.name, one.shown, one.reasons[0]) for one in found.plan] == [
        ("loader.backend", ["threads", "inline"], "set: "),
        ("new", ["not planned", "2"], ""),
    ]
    assert differing(found.machine) == [
        ("gpus", "Card", "null"),
        ("version of torch", "2.12", "2.13"),
        ("commit", "a0123456a012", "b0123456b012, changed"),
    ]
    assert [(one.name, one.shown) for one in found.metrics] == [
        ("val/x", ["0.5", "not finite"]),
        ("val/gone", ["1", ""]),
    ]


def test_a_setting_that_both_plans_made_the_same_does_not_differ() -> None:
    plan = {"loader.num_workers": 0, "loader.backend": "inline"}
    a, b = ({"config": {"loader": {"num_workers": one, "backend": "auto"}}, "plan": plan} for one in (None, 0))
    assert both(a, b).settings == []
    found = both(a, b | {"plan": plan | {"loader.num_workers": 1}})
    assert differing(found.settings) == [("loader.num_workers", "null", "0")]


def test_metrics_after_other_steps_are_said_to_be_so() -> None:
    found = both({"steps": 300, "metrics": {"val/x": 0.5}}, {"steps": 32, "metrics": {"val/x": 0.5}})
    assert "Metrics are those after 300 steps in A and 32 steps in B." in found.caveats
    assert not any("Metrics" in line for line in both({"steps": 300}, {"steps": 32}).caveats)


def test_utilisation_and_energy_are_those_of_each_gpu() -> None:
    busy = {0: {"time_s": np.arange(100.0), "util_pct": np.full(100, 40.0)}}
    a = {"curves": busy, "gpus": {"0": {"energy_per_sample_j": 1.0}}}
    b = {"curves": {0: {**busy[0], "util_pct": np.full(100, 80.0)}}, "gpus": {"0": {"energy_per_sample_j": 0.5}}}
    rows = shown(both(a | {"copy_ms": 0.1}, b | {"copy_ms": 0.1}))
    assert rows["GPU 0: utilisation"] == ["40 %", "80 %", "2.0 times (2.0 to 2.0)"]
    assert rows["GPU 0: utilisation, p95"] == ["40 %", "80 %", ""]
    assert rows["GPU 0: energy a sample"] == ["1 J", "500 mJ", "0.50 times"]
    assert not [name for name in shown(both(a, b)) if name.startswith("GPU")]  # on a CPU they are those of others


def test_without_a_gpu_the_processor_is_watched() -> None:
    curve = {HOST: {"time_s": np.arange(3.0), "cpu_pct": np.array([800.0, 900.0, 1000.0])}}
    rows = shown(both({"curves": curve, "machine": {"cpu_quota_cores": 16.0}}, {"curves": curve, "machine": {}}))
    assert rows["CPU cores busy"] == ["9.00 of 16", "9.00", "1.00 times"]
    assert rows["CPU cores busy, p5"] == ["8.10 of 16", "8.10", ""]


def test_figures_of_no_real_gpu_are_called_so_once() -> None:
    simulated = {"machine": {"gpus": [{"name": "Card", "is_simulated": True}]}}
    assert [line[:26] for line in both(simulated, simulated).caveats] == ["A and B: Simulated: Card. "]
    assert both(b=simulated).caveats[0].startswith("B: Simulated")


def test_two_empty_records_can_be_compared() -> None:
    one = evidence(
        throughput=None, time=None, machine={}, columns=dict.fromkeys(("wait_ms", "compute_ms", "host_ms"), np.empty(0))
    )
    found = Comparison(one, replace(one))
    assert (found.settings, found.plan, found.machine, found.metrics) == ([], [], [], [])
    assert set(shown(found)) == {"status", "steps", "time, all in all"}
