"""How often the interval holds the truth, on series whose mean is known. Of 1600 runs at 95 % the sd is 0.5 %."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from wellfed.observe.timing.interval import MIN_STEPS, error_of_mean, half_width, student_t

SAMPLES, MEAN_S = 8, 0.01


def autoregressive(runs: int, steps: int, autocorrelation: float, seed: int) -> np.ndarray:
    """Float ``[runs, steps]`` of mean 0 and variance 1; each value is so much like the one before."""
    draw = np.random.default_rng(seed).standard_normal((runs, steps))
    rest = math.sqrt(1 - autocorrelation**2)
    for step in range(1, steps):
        draw[:, step] = autocorrelation * draw[:, step - 1] + rest * draw[:, step]
    return draw


def holds(times_s: list[float]) -> bool:
    """Whether the interval from these steps has the true rate in it."""
    samples = [SAMPLES] * len(times_s)
    half = half_width(samples, times_s)
    assert half is not None
    return abs(sum(samples) / sum(times_s) - SAMPLES / MEAN_S) <= half


@pytest.mark.parametrize("autocorrelation", [0, 0.5, 0.9])
@pytest.mark.parametrize(("steps", "runs"), [(40, 1600), (57, 800), (200, 400), (1000, 200)])
def test_the_interval_holds_the_true_rate_nine_times_in_ten_at_least(
    steps: int, runs: int, autocorrelation: float
) -> None:
    times_s = MEAN_S * (1 + 0.1 * autoregressive(runs, steps, autocorrelation, seed=steps))
    assert sum(holds(row) for row in times_s.tolist()) / runs >= 0.92


def is_narrow(times_s: list[float]) -> bool:
    half = half_width([SAMPLES] * len(times_s), times_s)
    return half is not None and half <= 0.02 * SAMPLES * len(times_s) / sum(times_s)


def test_what_alternates_is_not_taken_for_certainty() -> None:
    assert error_of_mean([1.0, -1.0] * 20) >= 1 / math.sqrt(40)


def test_a_drift_makes_it_wide() -> None:
    shuffled = [float(value) for value in range(40)]
    random.Random(0).shuffle(shuffled)
    assert error_of_mean(sorted(shuffled)) > 3 * error_of_mean(shuffled)


def test_too_few_steps_have_none() -> None:
    assert half_width([8] * (MIN_STEPS - 1), [1.0] * (MIN_STEPS - 1)) is None
    assert half_width([], []) is None
    assert half_width([8] * 40, [0.0] * 40) is None


@examples(25)
@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e3)), min_size=40, max_size=130))
def test_it_goes_with_the_unit_of_time(steps: list[tuple[int, float]]) -> None:
    samples, times_s = [size for size, _ in steps], [time_s for _, time_s in steps]
    half = half_width(samples, times_s)
    in_ms = half_width(samples, [1e3 * time_s for time_s in times_s])
    assert half is not None
    assert in_ms is not None
    assert math.isfinite(half)
    assert in_ms * 1e3 == pytest.approx(half, rel=1e-3, abs=1e-6 * sum(samples) / sum(times_s))


# https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
           12: 2.179, 15: 2.131, 19: 2.093, 20: 2.086, 30: 2.042, 60: 2.000, 100: 1.984}  # fmt: skip


@pytest.mark.parametrize("degrees", STUDENT)
def test_students_t(degrees: int) -> None:
    assert student_t(degrees) == pytest.approx(STUDENT[degrees], rel=0.005)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 127.32), (10, 3.581), (60, 2.915)])
def test_a_far_quantile_of_students_t(degrees, quantile):
    assert student_t(degrees, 0.9975) == pytest.approx(quantile, rel=0.003)
