import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellfed import DataError
from workloads.forecast.series import Parts, SeriesSet, cut_by_time, filled, split_by_time
from workloads.forecast.steps import Frequency

DAILY = Frequency("time", 86_400_000_000, np.datetime64("2024-01-01", "us"))
NAN = np.nan


def one(values: list[float], parts: Parts, fill, horizon: int = 2) -> list[float]:
    made = filled(SeriesSet(["a"], [np.array(values)], [3], DAILY), [parts], fill, horizon)
    return made.values[0].tolist()


def same(found: list[float], expected: list[float]) -> bool:
    return np.array_equal(found, expected, equal_nan=True)


GAPS = [1.0, NAN, NAN, 4.0, NAN, 6.0, NAN, 9.0]


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        ("none", GAPS),
        ("zero", [1, 0, 0, 4, 0, 6, 0, 9]),
        ("forward", [1, 1, 1, 4, 4, 6, 6, 9]),
        ("linear", [1, 2, 3, 4, 5, 6, 7.5, 9]),
    ],
)
def test_gaps_are_filled_as_configured(fill, expected: list[float]):
    assert same(one(GAPS, Parts(8, 8, 8), fill), expected)


values = st.lists(st.one_of(st.none(), st.floats(-9, 9)), min_size=12, max_size=24)


@settings(max_examples=30)
@given(values=values, horizon=st.integers(1, 3), change=st.floats(10, 20))
def test_no_filled_step_knows_what_is_forecast_after_it(values: list[float | None], horizon: int, change: float):
    """Whatever lies after an origin may change: nothing before it does."""
    value_T = np.array([1.0, *(NAN if value is None else value for value in values), 1.0])
    parts = cut_by_time(len(value_T), horizon, 0.2, 0.2)
    before = np.array(one(value_T.tolist(), parts, "linear", horizon))
    for origin in range(parts.train_end, len(value_T), horizon):
        other_T = value_T.copy()
        other_T[origin:] += change
        after = np.array(one(other_T.tolist(), parts, "linear", horizon))
        assert np.array_equal(before[:origin], after[:origin])
    assert not np.isnan(before).any()


@settings(max_examples=50)
@given(
    num_steps=st.integers(1, 500),
    horizon=st.integers(1, 30),
    val_frac=st.sampled_from([0, 0.1, 0.3]),
    test_frac=st.sampled_from([0, 0.1, 0.5]),
)
def test_parts_are_whole_horizons_near_their_share(num_steps: int, horizon: int, val_frac: float, test_frac: float):
    cut = cut_by_time(num_steps, horizon, val_frac, test_frac)
    assert cut.train_end <= cut.val_end <= cut.end == num_steps
    for size, frac in ((cut.val_end - cut.train_end, val_frac), (cut.end - cut.val_end, test_frac)):
        assert size % horizon == 0
        assert (size == 0) == (frac == 0)
        assert size == 0 or abs(size - frac * num_steps) <= horizon


def test_series_too_short_are_left_out_or_refused():
    long, short = np.arange(50.0), np.arange(13.0)
    found = SeriesSet(["long", "short"], [long, short], [0, 7], DAILY, ("read",))
    arguments = {"horizon": 3, "val_frac": 0.1, "test_frac": 0.1}
    kept, parts = split_by_time(found, shortest=6, **arguments)
    assert (kept.names, kept.starts, parts) == (["long"], [0], [Parts(38, 44, 50)])
    assert kept.notes == ("read", "1 of 2 series too short and left out, the first: short (13 steps)")
    assert split_by_time(found, shortest=4, **arguments)[0].names == ["long", "short"]
    with pytest.raises(
        DataError,
        match=r"The embedded set: no series is long enough. The longest, 'long', has 50 steps of 1 day, and training "
        r"takes a window of 40 and a horizon of 3, with "
        r"12 steps held out after them \(val_frac, test_frac\)\..*smaller workload\.data\.windows, horizon, val_frac",
    ):
        split_by_time(found, shortest=40, **arguments)
