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
    assert (np.diff(found.x) > 0).all()
    assert len(found.y) <= MOST
    assert (found.low is not None) == (len(finite) > MOST)
    if len(finite):
        low, high = (found.y, found.y) if found.low is None else (found.low, found.high)
        assert (low.min(), high.max()) == (finite.min(), finite.max())
        slack = 1e-9 * np.abs(finite).max()
        assert (low <= found.y + slack).all()
        assert (found.y <= high + slack).all()
    if len(finite) <= MOST:
        assert found.y == pytest.approx(finite)


def test_the_mean_of_a_bin_is_that_of_its_readings() -> None:
    found = binned(np.arange(3000.0), np.arange(3000.0))
    assert len(found.x) == MOST
    assert found.y == pytest.approx(found.x)
    assert found.high - found.low == pytest.approx(np.full(MOST, 9))
