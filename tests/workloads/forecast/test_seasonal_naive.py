import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.forecast.seasonal_naive import seasonal_naive

NUMBERS = st.floats(-1e3, 1e3, width=32)


@given(
    window=st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=12),
    season=st.integers(1, 14),
    horizon=st.integers(1, 16),
)
def test_it_agrees_with_looking_back_step_by_step(window: list[tuple[float, bool]], season: int, horizon: int):
    values, observed = zip(*window, strict=True)
    there = [value for value, seen in window if seen]
    expected = []
    for step in range(horizon):
        places = range(len(window) + step, -1, -1)
        same = [p for p in places if p < len(window) and (len(window) + step - p) % season == 0 and observed[p]]
        expected.append(values[same[0]] if same else there[-1] if there else 0.0)
    forecast = seasonal_naive(torch.tensor([values]), torch.tensor([observed]), season, horizon)
    assert forecast.tolist() == [expected]


def test_each_window_of_a_batch_has_its_own_gaps():
    value = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    observed = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    assert seasonal_naive(value, observed, 2, 3).tolist() == [[3.0, 4.0, 3.0], [5.0, 8.0, 5.0]]
