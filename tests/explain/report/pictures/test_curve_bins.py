"""Curves of any length keep their shape in a few hundred points."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from wellfed.explain.report.pictures.picture_parts import MOST, binned

values = arrays.arrays(float, st.integers(0, 2000), elements=st.floats(-1e9, 1e9) | st.just(np.nan))


@given(values)
def test_bins_hold_all_that_is_finite_and_no_more_than_can_be_seen(curve: np.ndarray) -> None:
    found = binned(np.arange(len(curve), dtype=float), curve)
    finite = curve[np.isfinite(curve)]
    there = np.isfinite(found.y)
    assert (np.diff(found.x) > 0).all()
    assert there.sum() <= MOST + (~there).sum() <= 2 * MOST
    assert (found.low is not None) == (len(finite) > MOST)
    if len(finite):
        low, high = (found.y, found.y) if found.low is None else (found.low, found.high)
        assert (low[there].min(), high[there].max()) == (finite.min(), finite.max())
        slack = 1e-9 * np.abs(finite).max()
        assert (low[there] <= found.y[there] + slack).all()
        assert (found.y[there] <= high[there] + slack).all()
    if len(finite) <= MOST:
        assert found.y[there] == pytest.approx(finite)


def test_a_gap_is_not_bridged() -> None:
    x = np.concatenate([np.arange(10.0), np.arange(50.0, 60.0)])
    found = binned(x, np.ones(20))
    assert np.flatnonzero(np.isnan(found.y)).tolist() == [10]
    assert np.isnan(binned(np.repeat(x, 100) + np.tile(np.arange(100) / 100, 20), np.ones(2000)).y).sum() == 1


def test_what_is_not_finite_is_a_gap() -> None:
    values = np.arange(20.0)
    values[[0, 5, 6, 12]] = np.nan, np.inf, np.nan, -np.inf
    assert np.isnan(binned(np.arange(20.0), values).y).sum() == 2


def test_a_value_that_is_about_a_long_time_leaves_no_gap() -> None:
    took_s = np.where(np.arange(100) == 50, 20.0, 1.0)
    x = np.cumsum(took_s)
    assert np.isnan(binned(x, took_s).y).sum() == 1
    assert np.isnan(binned(x, took_s, lasts=took_s).y).sum() == 0


def test_the_mean_of_a_bin_is_that_of_its_readings() -> None:
    found = binned(np.arange(3000.0), np.arange(3000.0))
    assert len(found.x) == MOST
    assert found.y == pytest.approx(found.x)
    assert found.high - found.low == pytest.approx(np.full(MOST, 9))
