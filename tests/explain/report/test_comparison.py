"""Two runs side by side: what differs, ratios with their intervals, and what keeps figures from being compared."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.evidence_of import evidence
from wellfed.explain.report.comparison import Comparison, Ratio
from wellfed.explain.report.figures import Estimate
from wellfed.units import show_ms

FIGURES = st.floats(1e-3, 1e6)
SHARES = st.floats(0, 0.9)


def both(a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> Comparison:
    """Two runs of the same workload, changed."""
    same = {"workload": "recsys", "seed": 1}
    return Comparison(evidence(**same | (a or {})), evidence(**same | (b or {})))


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


def test_time_and_share_of_a_phase_are_of_the_mean_step() -> None:
    found = both({"compute_ms": 20.0}, {"compute_ms": 20.0})
    for record in found.records:
        assert record.time is not None
        record.time |= {"forward_frac": 0.3, "backward_frac": 0.5, "optimizer_frac": 0.1}
    assert shown(found)["forward"] == 2 * [f"30 % ({show_ms(0.3 * 20.1)})"] + ["1.00 times"]


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


def test_other_units_have_no_ratio() -> None:
    found = both()
    throughput = found.b.record.throughput
    assert throughput is not None
    throughput["sample_unit"] = "images"
    assert found.caveats == ["Samples are samples in A and images in B: rates have no ratio."]
    assert found.caveats[0] in found.verdict
    assert shown(found)["rate"][2] == ""


def test_utilisation_and_energy_are_those_of_the_gpus() -> None:
    a = {"gpus": {"0": {"util_pct": {"mean": 40.0}, "energy_per_sample_j": 1.0}}}
    b = {"gpus": {"0": {"util_pct": {"mean": 80.0}, "energy_per_sample_j": 0.5}}}
    rows = shown(both(a | {"copy_ms": 0.1}, b | {"copy_ms": 0.1}))
    assert rows["GPU"] == ["40 %", "80 %", "2.0 times"]
    assert rows["energy a sample"] == ["1 J", "500 mJ", "0.50 times"]
    assert "GPU" not in shown(both(a, b))  # on a CPU they are those of others


def test_two_empty_records_can_be_compared() -> None:
    one = evidence(
        throughput=None, time=None, machine={}, columns=dict.fromkeys(("wait_ms", "compute_ms", "host_ms"), np.empty(0))
    )
    found = Comparison(one, replace(one))
    assert (found.settings, found.machine, found.metrics) == ([], [], [])
    assert set(shown(found)) == {"status", "steps", "time, all in all"}


def test_settings_differ_as_they_were_in_effect() -> None:
    config = {"loader": {"backend": "auto", "num_workers": 2}}
    planned, typed = {"plan": {"loader.backend": "threads"}}, {"loader": {"backend": "threads", "num_workers": 4}}
    found = both({"config": config, **planned}, {"config": typed})
    assert [(one.name, *one.shown) for one in found.settings] == [("loader.num_workers", "2", "4")]


def test_figures_of_a_run_that_was_cut_short_and_metrics_of_other_steps_or_seeds_are_told() -> None:
    known = {"metrics": {"val/loss": 1.0}, "seed": 1}
    assert not both(known, known).caveats
    found = both(known, {**known, "steps": 88})
    found.b.record.status = "killed"
    assert found.caveats == [
        "B has the status killed: its figures are those until then.",
        "Metrics are those after 100 steps with seed 1, and 88 steps with 1.",
    ]
