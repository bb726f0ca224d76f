"""Ranks, intervals and notes of a leaderboard, from rows as a sweep writes them."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep.made import AXES, failed_row, row, rows, sweep_file
from wellfed.sweep.knob_effects import knob_effects
from wellfed.sweep.leaderboard import Leaderboard, leaderboard
from wellfed.sweep.ledger import Read, Row
from wellfed.sweep.repeats import Noise, Run, pooled_noise, rate_with_interval

RATES = st.floats(1e-3, 1e9)


def board(made: list[Row], axes=AXES, damaged=(), **more) -> Leaderboard:
    return leaderboard(sweep_file(axes, **more), Read(tuple(made), tuple(damaged)))


def two() -> list[Row]:
    """Of two loaders, 100 and 90 samples/s."""
    points = sweep_file({"loader": ("baseline", "auto")}).points
    return [row(points[0], 90.0), row(points[1], 100.0)]


def of_two(made: list[Row], **more) -> Leaderboard:
    return board(made, {"loader": ("baseline", "auto")}, **more)


@given(st.lists(RATES, min_size=1, max_size=6), st.floats(0, 0.3), st.integers(1, 20))
def test_a_rate_lies_in_its_interval_which_narrows_with_runs(rates: list[float], deviation: float, degrees: int):
    noise = Noise(deviation, degrees)
    rate, (low, high) = rate_with_interval([Run(each, None) for each in rates], noise)
    assert rate == pytest.approx(fmean(rates))
    assert low <= rate <= high
    more, (_, more_high) = rate_with_interval([Run(each, None) for each in rates * 2], noise)
    assert more == pytest.approx(rate)
    assert more_high - more <= (high - rate) * 0.75 + 1e-9 * rate


def test_one_run_has_its_own_interval_or_that_of_the_noise_whichever_is_wider():
    assert rate_with_interval([Run(100.0, 5.0)], None) == (100.0, (95.0, 105.0))
    _, (low, _) = rate_with_interval([Run(100.0, 5.0)], Noise(0.1, 4))
    assert low == pytest.approx(100 - 2.776 * 10, abs=0.2)
    assert rate_with_interval([Run(100.0, None)], None) == (100.0, None)


def test_noise_is_pooled_within_points_that_were_measured_more_than_once():
    assert pooled_noise([[Run(1.0, None)], [Run(5.0, None)]]) is None
    once, twice = [Run(7.0, None)], [Run(100.0, None), Run(100.0 * math.exp(0.2), None)]
    assert pooled_noise([once, twice, [Run(3.0, None)] * 3]) == Noise(pytest.approx(math.sqrt(0.02 / 3)), 3)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=3), st.lists(st.floats(-1, 1), min_size=2, max_size=2))
def test_effects_that_add_up_explain_all_of_a_full_grid(of_a: list[float], of_b: list[float]):
    values = [{"a": str(a), "b": str(b)} for a in range(3) for b in range(2)]
    logs = [of_a[int(point["a"])] + of_b[int(point["b"])] for point in values]
    found = knob_effects(values, [math.exp(log) for log in logs], ["a", "b"])
    if max(logs) - min(logs) < 1e-6:
        return  # nothing to explain
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-6)
    assert found.rest == pytest.approx(0, abs=1e-6)
    wider = max(("a", "b"), key=lambda axis: {"a": _spread(of_a), "b": _spread(of_b)}[axis])
    if abs(_spread(of_a) - _spread(of_b)) > 0.1:
        assert found.by_importance[0] == wider


def _spread(levels: list[float]) -> float:
    return math.sqrt(fmean((level - fmean(levels)) ** 2 for level in levels))


def test_axes_without_a_share_say_why():
    assert "1 point has a rate" in knob_effects([{"a": "1"}], [5.0], ["a"]).absent["a"]
    assert knob_effects([{"a": "1"}, {"a": "2"}], [5.0, 5.0], ["a"]).absent["a"] == "all rates are the same"
    one_value = knob_effects([{"a": "1", "b": "1"}, {"a": "1", "b": "2"}], [5.0, 6.0], ["a", "b"])
    assert "share the value 1" in one_value.absent["a"]
    uneven = [{"a": "1", "b": "1"}, {"a": "2", "b": "1"}, {"a": "2", "b": "2"}, {"a": "3", "b": "2"}]
    assert any("Points are missing" in note for note in knob_effects(uneven, [1.0, 2.0, 3.0, 7.0], ["a", "b"]).notes)


def test_each_point_has_one_entry_whatever_became_of_it():
    found = board(rows(sweep_file()))
    assert sorted(entry.point for entry in found.entries) == sorted(point.id for point in sweep_file().points)
    assert found.counts == {
        "ok": 17, "oom": 1, "infeasible": 1, "invalid": 1, "timeout": 1, "failed": 1, "killed": 1, "pending": 1
    }  # fmt: skip
    speeds = [entry.samples_per_s for entry in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert [entry.rank for entry in found.unranked] == [None] * 6
    assert found.ranked[0].values == {"loader": "aggressive", "memory": "cache", "gpu.precision": "bf16-mixed"}


def test_what_was_confirmed_is_a_mean_and_its_noise_widens_the_others():
    made = rows(sweep_file())
    found, alone = board(made), board([each for each in made if each.kind == "trial"])
    best = found.ranked[0]
    mine = [each.samples_per_s for each in made if each.point == best.point]
    assert (best.runs, best.samples_per_s) == (4, pytest.approx(fmean(mine)))
    assert found.noise is not None
    assert found.noise.degrees == 9
    last, last_alone = found.ranked[-1], alone.ranked[-1]
    assert last.ci95[1] - last.ci95[0] > last_alone.ci95[1] - last_alone.ci95[0]
    assert any("No point was measured twice" in note for note in alone.notes)


def test_intervals_that_overlap_share_a_rank_and_those_without_claim_nothing():
    apart, tied = of_two(two()), of_two([replace(each, ci95=(80.0, 110.0)) for each in two()])
    assert [entry.label for entry in apart.ranked] == ["1", "2"]
    assert [entry.label for entry in tied.ranked] == ["1=", "1="]
    unknown = of_two([replace(each, ci95=None) for each in two()])
    assert [entry.label for entry in unknown.ranked] == ["1?", "2?"]
    assert any("no interval" in note for note in unknown.notes)


def test_rates_are_compared_with_the_best_and_with_the_baseline():
    found = {entry.values["loader"]: entry for entry in of_two(two()).entries}
    assert (found["auto"].of_best, found["baseline"].of_best) == (1.0, 0.9)
    assert found["auto"].of_baseline == pytest.approx(100 / 90)
    assert found["baseline"].of_baseline == 1.0
    other = board([row(point) for point in sweep_file({"seed": ("1", "2")}).points], {"seed": ("1", "2")})
    assert {entry.of_baseline for entry in other.entries} == {None}


def test_confirms_count_for_the_trial_that_they_followed_alone():
    first, second = two()
    confirm = replace(second, kind="confirm", samples_per_s=200.0)
    later = replace(second, attempt=2, samples_per_s=50.0)
    assert of_two([first, second, confirm]).ranked[0].runs == 2
    again = {entry.point: entry for entry in of_two([first, second, confirm, later]).entries}[second.point]
    assert (again.runs, again.samples_per_s) == (1, 50.0)
    other_code = of_two([first, second, replace(confirm, code="other")])
    assert {entry.runs for entry in other_code.ranked} == {1}
    failed = of_two([first, second, replace(confirm, status="oom", samples_per_s=None)])
    assert any(
        f"{second.point}: 1 run that should have confirmed it gave no rate (oom)" in note for note in failed.notes
    )


def test_rates_of_another_code_or_device_are_marked():
    first, second = two()
    found = of_two([first, replace(second, code="newer")])
    assert sum(bool(entry.marks) for entry in found.entries) == 1
    assert any("2 versions of the code" in note for note in found.notes)
    assert any("2 devices" in note for note in of_two([first, replace(second, device="another")]).notes)


def test_the_front_is_what_nothing_beats_in_both():
    points = sweep_file({"seed": ("1", "2", "3")}).points
    made = [
        row(point, rate, peak_memory_gib=peak)
        for point, rate, peak in zip(points, (9.0, 8.0, 7.0), (5.0, 2.0, 3.0), strict=True)
    ]
    found = board(made, {"seed": ("1", "2", "3")})
    assert [entry.on_front for entry in found.ranked] == [True, True, False]


def test_points_of_earlier_grids_and_unreadable_lines_are_left_out_and_told():
    stranger = row(sweep_file({"seed": ("9",)}).points[0])
    found = of_two([*two(), stranger], damaged=[4])
    assert len(found.entries) == 2
    assert any("1 point of earlier grids" in note for note in found.notes)
    assert any("Unreadable lines of the ledger" in note and "4" in note for note in found.notes)


def test_a_point_that_failed_later_has_no_rate():
    first, second = two()
    point = sweep_file({"loader": ("baseline", "auto")}).points[1]
    found = of_two([first, second, failed_row(point, "oom", attempt=2)])
    assert [entry.status for entry in found.entries] == ["ok", "oom"]
    assert found.entries[1].rank is None
