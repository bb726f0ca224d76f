"""How sure a rate is: one run, several, and the noise between them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.study.repeats import MeasuredRun as Run
from wellfed.study.repeats import Noise, mean_with_interval, pooled_noise

RATES = st.floats(1e-3, 1e9)
RUNS = st.lists(
    st.builds(
        lambda rate, share: Run(rate, None if share is None else rate * share),
        RATES,
        st.none() | st.floats(0, 2),
    ),
    min_size=1,
    max_size=6,
)
NOISES = st.none() | st.builds(Noise, st.floats(0, 1), st.integers(1, 30))


def test_several_runs_have_students_interval_of_the_pooled_noise() -> None:
    rate, interval = mean_with_interval([Run(99.0, 0.1), Run(100.0, 0.1), Run(101.0, 0.1)], Noise(0.02, 2))
    assert rate == 100.0
    half = 4.303 * 0.02 * 100 / math.sqrt(3)
    assert interval == pytest.approx((100 - half, 100 + half))


def test_the_noise_of_others_widens_a_point_that_was_measured_once() -> None:
    noise = Noise(0.01, 10)
    _, interval = mean_with_interval([Run(100.0, 0.5)], noise)
    assert interval == pytest.approx((100 - 2.228, 100 + 2.228), abs=0.01)
    assert mean_with_interval([Run(100.0, None)], noise)[1] == interval
    assert mean_with_interval([Run(100.0, 5.0)], noise)[1] == (95.0, 105.0)


def test_own_intervals_of_four_runs_are_halved_unless_the_runs_agree_better() -> None:
    apart = [Run(rate, 4.0) for rate in (95.0, 98.0, 102.0, 105.0)]
    assert mean_with_interval(apart, None) == (100.0, (98.0, 102.0))
    alike = [Run(rate, 60.0) for rate in (22.7, 25.1, 27.4, 30.6)]
    _, interval = mean_with_interval(alike, pooled_noise([alike]))
    assert interval is not None
    assert 20 < interval[0] < 22.7
    assert 30.6 < interval[1] < 33


@given(RUNS, NOISES)
def test_the_rate_is_in_its_interval_and_among_its_runs(runs: list[Run], noise: Noise | None) -> None:
    rate, interval = mean_with_interval(runs, noise)
    rates = [run.figure for run in runs]
    assert min(rates) * (1 - 1e-12) <= rate <= max(rates) * (1 + 1e-12)
    if interval is None:
        assert noise is None
        assert any(run.half_width is None for run in runs)
    else:
        assert 0 <= interval[0] <= rate <= interval[1]


def test_noise_of_known_runs() -> None:
    twice = [Run(math.exp(-0.01), None), Run(math.exp(0.01), None)]  # variance 2e-4, 1 degree
    thrice = [Run(50 * math.exp(log), None) for log in (-0.02, 0.0, 0.02)]  # variance 4e-4, 2 degrees
    noise = pooled_noise([twice, thrice, [Run(7.0, None)]])
    assert noise is not None
    assert noise.degrees == 3
    assert noise.relative_sd == pytest.approx(math.sqrt((2e-4 + 2 * 4e-4) / 3))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw, covered = random.Random(3), 0
    for _ in range(300):
        points = [[Run(100 * math.exp(draw.gauss(0, 0.02)), 0.1) for _ in range(4)] for _ in range(3)]
        _, interval = mean_with_interval(points[0], pooled_noise(points))
        assert interval is not None
        covered += interval[0] <= 100 <= interval[1]
    assert 0.91 <= covered / 300 <= 0.99
