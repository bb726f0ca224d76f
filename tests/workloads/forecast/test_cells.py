from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.forecast.cells import Unclear, looks_like_dates, looks_like_numbers, parse_dates, parse_numbers


def comma_style(number: float) -> str:
    """1234.5 as 1.234,5."""
    return f"{number:,}".translate(str.maketrans(",.", ".,"))


numbers = st.floats(-1e7, 1e7).map(lambda number: round(number, 2))


@settings(max_examples=50, deadline=None)
@given(values=st.lists(numbers, min_size=1, max_size=9))
def test_numbers_come_back_from_any_style_that_is_named(values: list[float]):
    for text, decimal in ((str, None), (lambda x: f"{x:,}", "."), (comma_style, ",")):
        cells = [text(value) for value in values]
        assert looks_like_numbers(cells)
        (found,) = parse_numbers([cells], decimal)
        assert found.tolist() == values


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1,5", "2,25"], [1.5, 2.25]),
        (["1.234,5", "12"], [1234.5, 12]),
        (["1,234", "0,567"], [1.234, 0.567]),
        (["1,234.5", "12"], [1234.5, 12]),
        (["1,234,567", "1"], [1234567, 1]),
        (["1 234,5", "2\u00a0000,5"], [1234.5, 2000.5]),
        (["1 234.5"], [1234.5]),
        (["1,5", "2.5", "3,5"], [1.5, None, 3.5]),
        (["-0,5", "+3", ",5", "1,5e3"], [-0.5, 3, 0.5, 1500]),
        (["1", "", "NA", "-", "nan", "x", "12 kg", "5%", "1_000", "0x10"], [1, *[None] * 9]),
    ],
)
def test_the_style_of_numbers_is_told_by_all_cells(cells: list[str], expected: list[float | None]):
    (found,) = parse_numbers([cells])
    assert [None if np.isnan(value) else value for value in found] == expected


def test_one_column_tells_for_all_and_a_tie_is_asked_about():
    assert [column.tolist() for column in parse_numbers([["1,234"], ["0,5"]])] == [[1.234], [0.5]]
    with pytest.raises(Unclear, match=r"Values such as 1,234 .*workload\.data\.decimal"):
        parse_numbers([["1,234"], ["5"]])


WAYS = (
    "%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%Y%m%d", "%d-%b-%Y", "%B %d, %Y", "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%d %H:%M:%S.%f", "%d.%m.%Y %H:%M", "%Y%m%d%H%M%S"
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    form=st.sampled_from(WAYS),
    times=st.lists(st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1)), min_size=1, max_size=6),
)
def test_dates_come_back_from_any_way_of_writing(form: str, times: list[datetime.datetime]):
    cells = [time.strftime(form) for time in times]
    expected = [datetime.datetime.strptime(cell, form) for cell in cells]
    assert parse_dates(cells)[0].tolist() == expected


@settings(max_examples=25, deadline=None)
@given(days=st.lists(st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1)), min_size=1, max_size=6))
def test_days_and_months_are_told_apart_or_asked_about(days: list[datetime.date]):
    for form, day_first in (("%d/%m/%Y", True), ("%m/%d/%Y", False)):
        cells = [day.strftime(form) for day in days]
        assert parse_dates(cells, day_first)[0].astype("M8[D]").tolist() == days
        if any(day.day > 12 for day in days):
            assert parse_dates(cells)[0].astype("M8[D]").tolist() == days
        else:
            with pytest.raises(Unclear, match=r"workload\.data\.day_first"):
                parse_dates(cells)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("2024Q3", "2024-07-01"),
        ("2024-Q1", "2024-01-01"),
        ("2024-W01", "2024-01-01"),
        ("2024-05", "2024-05-01"),
        ("1999", "1999-01-01"),
        ("202405", "2024-05-01"),
        ("1714521600", "2024-05-01"),
        ("1714521600000", "2024-05-01"),
        ("May 2024", "2024-05-01"),
        ("2024-5-1 7:30", "2024-05-01T07:30"),
        *(
            (cell, None)
            for cell in ("", "x", "2024-02-30", "13", "31.02.2024", "2024Q5", "2024-W60", "99999999", "may")
        ),
    ],
)
def test_single_dates(cell: str, expected: str | None):
    (date,), _ = parse_dates([cell])
    assert np.isnat(date) if expected is None else date == np.datetime64(expected)


def test_offsets_from_utc():
    local, notes = parse_dates(["2024-01-01T23:00+05:30", "2024-01-02T23:00+05:30"])
    assert (local[0], notes) == (np.datetime64("2024-01-01T23:00"), ())
    mixed, notes = parse_dates(["2024-03-31T01:00:00+01:00", "2024-03-31T03:00:00+0200", "2024-03-31T02:00Z"])
    assert [str(date)[11:16] for date in mixed] == ["00:00", "01:00", "02:00"]
    assert "several UTC offsets" in notes[0]


def test_what_columns_look_like():
    assert looks_like_dates(["2024-01-05", "NA", "x"]) is False
    assert looks_like_dates(["20240105", "20240106"])
    assert looks_like_dates(["05/06/2024"])  # a date, whichever of the two it is
    assert not any(map(looks_like_dates, (["2024", "2025"], ["1.5"], ["", "NA"], ["north"])))
    assert looks_like_numbers(["", "NA"])
    assert looks_like_numbers(["1,5", "2", "x"])
    assert not looks_like_numbers(["x", "y", "2"])


def test_ten_digits_are_hours_where_most_look_so_and_seconds_since_1970_elsewhere():
    hours, _ = parse_dates(["2024053122", "2024053123", "2024060100", "2024060124"])
    assert hours[:3].tolist() == [
        datetime.datetime(2024, 5, 31, 22),
        datetime.datetime(2024, 5, 31, 23),
        datetime.datetime(2024, 6, 1),
    ]
    assert np.isnat(hours[3])
    seconds, _ = parse_dates([str(2024053122 + 3600 * hour) for hour in range(9)])
    assert (np.diff(seconds) == np.timedelta64(1, "h")).all()
