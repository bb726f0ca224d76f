import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wellfed.observe.telemetry.series import Series

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def filled(values, **options):
    series = Series(**options)
    for value in values:
        series.add(value)
    return series


@given(values=VALUES)
def test_few_readings_are_summed_up_exactly(values):
    entry = filled(values).entry()
    assert list(entry) == ["mean", "p5", "p50", "p95", "max", "n"]
    assert entry["n"] == len(values)
    assert entry["max"] == max(values)
    np.testing.assert_allclose(entry["mean"], np.mean(values), rtol=1e-9, atol=1e-6)
    quantiles = [entry["p5"], entry["p50"], entry["p95"]]
    np.testing.assert_array_equal(quantiles, np.quantile(values, [0.05, 0.5, 0.95]))


@given(values=VALUES, kept=st.integers(1, 20))
def test_of_many_only_so_many_are_kept_yet_mean_and_max_are_of_all(values, kept):
    series = filled(values, kept=kept)
    assert len(series._values) == min(kept, len(values))
    assert set(series._values) <= set(values)
    entry = series.entry()
    assert (entry["n"], entry["max"]) == (len(values), max(values))
    np.testing.assert_allclose(entry["mean"], np.mean(values), rtol=1e-9, atol=1e-6)
    assert min(values) <= entry["p5"] <= entry["p50"] <= entry["p95"] <= max(values)


def test_quantiles_of_a_long_run_are_those_of_all_of_it():
    # A ramp: whoever kept only its begin or only its end would be far off.
    entry = filled(np.linspace(0, 100, 20_000), kept=1000).entry()
    assert 3 < entry["p5"] < 7
    assert 44 < entry["p50"] < 56
    assert 93 < entry["p95"] < 97
