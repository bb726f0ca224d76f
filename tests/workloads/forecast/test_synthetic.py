import numpy as np

from workloads.forecast.synthetic import daily_series


def test_equal_seeds_give_equal_sets_and_other_seeds_others():
    (dates, values, names), (_, again, _), (_, other, _) = (daily_series(5, 400, seed) for seed in (0, 0, 1))
    assert values.shape == (5, 400)
    assert dates.shape == (400,)
    assert len(set(names)) == 5
    assert np.array_equal(values, again)
    assert not np.allclose(values, other)
    assert (values > 0).all()
