import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.footprint import curve as module
from wellfed.footprint.curve import MOST_POINTS, NEAR_FRAC, curve
from wellfed.footprint.footprint import Point, on_curve, whole_pass


def measured(lines, asked):
    def point(size):
        asked.append(size)
        peak = max(start + slope * size for start, slope in lines)
        return Point(size, peak, 0, peak)

    return point


def test_a_straight_curve_takes_three_points():
    asked = []
    points = curve(measured([(0, 7)], asked), 2048)
    assert [point.micro_batch for point in points] == [1, 1024, 2048]
    assert sorted(asked) == [1, 1024, 2048]


def test_a_bend_is_found_where_it_is():
    points = curve(measured([(900, 0), (0, 3)], asked := []), 4096)
    assert 300 in asked
    assert len(points) <= 5


def test_when_time_is_up_the_lines_stay_wide(monkeypatch):
    monkeypatch.setattr(module, "MOST_S", 0.0)
    assert len(curve(measured([(900, 0), (0, 3)], []), 4096)) == 3


@given(
    lines=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1, max_size=3),
    samples=st.integers(1, 3000),
    beside=st.integers(0, 10**7),
    data=st.data(),
)
def test_lines_between_the_points_are_near_and_never_below(lines, samples, beside, data):
    asked = []
    points = curve(measured(lines, asked), samples, beside=beside)
    assert len(asked) == len(set(asked)) == len(points) <= MOST_POINTS
    assert (points[0].micro_batch, points[-1].micro_batch) == (1, samples)
    size = data.draw(st.integers(1, samples))
    truth = max(start + slope * size for start, slope in lines)
    predicted = on_curve(points, size, whole_pass)
    assert predicted >= truth
    if len(points) < MOST_POINTS:
        assert predicted - truth <= 2 * NEAR_FRAC * (beside + truth) + 1


@pytest.mark.parametrize(("samples", "lowest", "sizes"), [(1, 1, [1]), (2, 1, [1, 2]), (1, 2, [1]), (5, 2, [2, 4, 5])])
def test_few_samples(samples, lowest, sizes):
    points = curve(measured([(10, 1)], []), samples, lowest=lowest)
    assert [point.micro_batch for point in points] == sizes
