"""The level of a utilisation curve: its mean decides, unless it swings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.explain.diagnosis.curves.test_swing import noise, wave
from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_of, verdict_of

PERCENT = st.floats(0, 100)


def at(values, interval_s=0.5):
    return interval_s * np.arange(len(values)), np.array(values, dtype=float)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(PERCENT, min_size=1, max_size=39))
def test_figures_lie_within_the_curve_and_the_mean_decides(values):
    level = utilisation_of(*at(values))
    assert min(values) <= level.p5_pct <= level.p95_pct <= level.peak_pct == max(values)
    assert min(values) <= level.mean_pct <= max(values)
    assert level.mean_pct == pytest.approx(np.mean(values))
    assert level.num == len(values)
    expected = "well used" if level.mean_pct >= 80 else "room left" if level.mean_pct >= 50 else "starved"
    assert (level.verdict, level.swing) == (expected, None)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.one_of(PERCENT, st.just(float("nan"))), max_size=39))
def test_readings_that_are_no_number_change_nothing(values):
    time_s, util_pct = at(values)
    there = np.isfinite(util_pct)
    assert utilisation_of(time_s, util_pct) == utilisation_of(time_s[there], util_pct[there])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    period_s=st.floats(3, 20),
    low=st.integers(0, 60),
    depth=st.integers(35, 40),
    num=st.integers(8, 20),
)
def test_a_planted_swing_overrides_whatever_the_mean(seed, period_s, low, depth, num):
    rng = np.random.default_rng(seed)
    time_s, values, mean_s = wave(
        rng, period_s=period_s, interval_s=0.5, duration_s=num * period_s, low=low, high=low + depth
    )
    level = utilisation_of(time_s, values)
    assert level.verdict == "swings"
    assert level.swing.period_s == pytest.approx(mean_s, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), first=PERCENT, last=PERCENT, number=st.integers(40, 600))
def test_neither_a_slow_ramp_nor_noise_swings(seed, first, last, number):
    rng = np.random.default_rng(seed)
    ramp = np.linspace(first, last, number) + rng.normal(0, 2, number)
    assert utilisation_of(*at(ramp)).verdict != "swings"
    assert utilisation_of(*noise(rng, number)).verdict != "swings"


def test_without_readings_there_is_no_level():
    assert utilisation_of(np.array([]), np.array([])) is None
    assert utilisation_of(np.arange(3.0), np.full(3, np.nan)) is None
    assert utilisation_of(np.full(3, np.nan), np.arange(3.0)) is None


def test_a_verdict_is_of_the_time_in_use():
    (in_use,), advice = verdict_of(*at([0.0] * 60 + [90.0] * 80 + [0.0] * 60))
    assert in_use == "utilisation 90 % on average: well used"
    assert verdict_of(*at([90.0] * 80)) == (["utilisation 90 % on average: well used"], advice)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([np.nan] * 5, "no utilisation was read"),
        ([50.0], "1 reading, too few for a verdict"),
        ([0.0] * 9, "nothing ran on it"),
    ],
)
def test_of_too_little_there_is_no_verdict(values, message):
    assert verdict_of(*at(values)) == ([message], None)
