"""Which knob mattered: shares that a reader can add up, and a reason where there is none."""

import math
import random
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.ranking.knob_effects import knob_effects

AXES = {"a": ("0", "1", "2"), "b": ("x", "y")}
GRID = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def made(a: float, b: float, both: float = 0.0) -> list[float]:
    """Rates of GRID with these effects on their logs."""
    logs = [a * int(point["a"]) + b * (point["b"] == "y") + both * (point == {"a": "2", "b": "y"}) for point in GRID]
    return [1000 * math.exp(log) for log in logs]


@given(st.lists(st.floats(1, 1e6), min_size=len(GRID), max_size=len(GRID)).filter(lambda r: max(r) > 1.01 * min(r)))
def test_shares_and_rest_of_a_full_grid_add_up_to_one(rates: list[float]) -> None:
    effects = knob_effects(GRID, rates, list(AXES))
    assert effects.rest is not None
    assert sum(effects.shares.values()) + effects.rest == pytest.approx(1, abs=1e-6)
    assert all(0 <= share <= 1 for share in (*effects.shares.values(), effects.rest))
    assert effects.notes == ()
    assert effects.points == len(GRID)


def test_of_noise_alone_no_knob_is_given_more_than_a_little() -> None:
    dice, axes = random.Random(0), {"a": "01234", "b": "0123"}
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    found = [
        knob_effects(points, [math.exp(dice.gauss(0, 0.1)) for _ in points], list(axes)).shares for _ in range(200)
    ]
    for axis in axes:
        assert fmean(shares[axis] for shares in found) < 0.06
        assert sum(shares[axis] == 0 for shares in found) > 80


def test_where_all_points_tie_no_knob_mattered() -> None:
    effects = knob_effects(GRID, made(0.01, 0.02), list(AXES), is_all_tied=True)
    assert effects.shares == {}
    assert effects.absent == dict.fromkeys(AXES, "all points tie: no difference of rate is beyond noise")


def test_effects_that_only_add_up_are_found_and_leave_nothing() -> None:
    effects = knob_effects(GRID, made(0.3, 0.5), list(AXES))
    squares = {"a": 4 * 0.3**2, "b": 6 * 0.25**2}
    total = sum(squares.values())
    assert effects.shares == pytest.approx({axis: square / total for axis, square in squares.items()})
    assert effects.rest == pytest.approx(0, abs=1e-9)


def test_the_knob_that_mattered_most_comes_first() -> None:
    assert knob_effects(GRID, made(0.01, 0.5), list(AXES)).by_importance == ["b", "a"]
    assert knob_effects(GRID, made(0.5, 0.01), list(AXES)).by_importance == ["a", "b"]


def test_what_only_a_combination_does_is_the_rest() -> None:
    rest = knob_effects(GRID, made(0.0, 0.0, both=1.0), list(AXES)).rest
    assert rest is not None
    assert rest > 0.3


def test_an_axis_of_one_value_has_no_share_and_a_reason() -> None:
    values = [{**point, "c": "only"} for point in GRID]
    effects = knob_effects(values, made(0.3, 0.5), [*AXES, "c"])
    assert effects.absent == {"c": "all points that have a rate share the value only"}
    assert effects.by_importance == ["b", "a"]


@pytest.mark.parametrize(
    ("rates", "why"),
    [([], "no point has a rate"), ([5.0], "1 point has a rate"), ([5.0, 5.0, 5.0], "all have the same rate")],
)
def test_without_differences_no_axis_has_a_share(rates: list[float], why: str) -> None:
    effects = knob_effects(GRID[: len(rates)], rates, list(AXES))
    assert effects.shares == {}
    assert effects.rest is None
    assert effects.absent.keys() == AXES.keys()
    assert all(why in reason for reason in effects.absent.values())


def test_missing_points_make_shares_overlap_and_a_note_says_so() -> None:
    kept = [place for place, point in enumerate(GRID) if point != {"a": "2", "b": "x"}]
    rates = made(0.4, 0.5)
    effects = knob_effects([GRID[place] for place in kept], [rates[place] for place in kept], list(AXES))
    assert len(effects.notes) == 1
    assert "not independent" in effects.notes[0]
    assert effects.rest == pytest.approx(0, abs=1e-9)


def test_values_that_occur_together_only_can_not_be_told_apart() -> None:
    values = [{"a": "0", "b": "x"}, {"a": "0", "b": "x"}, {"a": "1", "b": "y"}, {"a": "1", "b": "y"}]
    effects = knob_effects(values, [100, 101, 200, 202], list(AXES))
    assert effects.shares["a"] == effects.shares["b"] > 0.9
    assert "can't be told apart" in effects.notes[0]


def test_as_many_effects_as_points_is_told() -> None:
    effects = knob_effects([{"a": "0"}, {"a": "1"}], [1.0, 2.0], ["a"])
    assert effects.shares == {"a": 1.0}
    assert any("as many effects as points" in note for note in effects.notes)
