import datetime

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.forecast.cells import Unclear, looks_like_dates, looks_like_numbers, parse_dates, parse_numbers


def dates_of(cells: list[str], day_first: bool | None = None) -> tuple[list, tuple[str, ...]]:
    """None where there is no date."""
    found, notes = parse_dates(pd.Series(cells, dtype=str), day_first)
    return [None if pd.isna(date) else date for date in found], notes


def numbers_of(*columns: list[str], decimal: str | None = None) -> list[list[float]]:
    found = parse_numbers(pd.DataFrame(dict(enumerate(columns)), dtype=str), decimal)
    return [found[column].tolist() for column in found]


def comma_style(number: float) -> str:
    """1234.5 as 1.234,5."""
    return f"{number:,}".translate(str.maketrans(",.", ".,"))


numbers = st.floats(-1e7, 1e7).map(lambda number: round(number, 2))


@settings(max_examples=50, deadline=None)
@given(values=st.lists(numbers, min_size=1, max_size=9))
def test_numbers_come_back_from_any_style_that_is_named(values: list[float]):
    for text, decimal in ((str, None), (lambda x: f"{x:,}", "."), (comma_style, ",")):
        cells = [text(value) for value in values]
        assert looks_like_numbers(pd.Series(cells))
        assert numbers_of(cells, decimal=decimal) == [values]


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
        (["1", "", "x", "12 kg", "5%", "1_000", "0x10", "inf", "1e31"], [1, *[None] * 8]),
    ],
)
def test_the_style_of_numbers_is_told_by_all_cells(cells: list[str], expected: list[float | None]):
    (found,) = numbers_of(cells)
    assert [None if np.isnan(value) else value for value in found] == expected


def test_one_column_tells_for_all_and_a_tie_is_asked_about():
    assert numbers_of(["1,234"], ["0,5"]) == [[1.234], [0.5]]
    with pytest.raises(Unclear, match=r"Values such as 1,234 .*workload\.data\.decimal"):
        numbers_of(["1,234"], ["5"])


WAYS = (
    "%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%Y%m%d", "%d-%b-%Y", "%B %d, %Y", "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%d %H:%M:%S.%f", "%d.%m.%Y %H:%M", "%d %B %Y"
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    form=st.sampled_from(WAYS),
    times=st.lists(st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1)), min_size=1, max_size=6),
)
def test_dates_come_back_from_any_way_of_writing(form: str, times: list[datetime.datetime]):
    cells = [time.strftime(form) for time in times]
    expected = [datetime.datetime.strptime(cell, form) for cell in cells]
    assert dates_of(cells, day_first=True if form[1] == "d" else None)[0] == expected


@settings(max_examples=25, deadline=None)
@given(days=st.lists(st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1)), min_size=1, max_size=6))
def test_days_and_months_are_told_apart_or_asked_about(days: list[datetime.date]):
    for form, day_first in (("%d/%m/%Y", True), ("%m/%d/%Y", False)):
        cells = [day.strftime(form) for day in days]
        assert [date.date() for date in dates_of(cells, day_first)[0]] == days
        if any(day.day > 12 for day in days):
            assert [date.date() for date in dates_of(cells)[0]] == days
        elif any(day.day != day.month for day in days):
            with pytest.raises(Unclear, match=r"workload\.data\.day_first"):
                dates_of(cells)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("2024-05", "2024-05-01"),
        ("1999", "1999-01-01"),
        ("20240501", "2024-05-01"),
        ("May 2024", "2024-05-01"),
        ("2024-5-1 7:30", "2024-05-01T07:30"),
        *((cell, None) for cell in ("x", "2024-02-30", "13", "31.02.2024", "99999999", "may", "1714521600")),
    ],
)
def test_single_dates(cell: str, expected: str | None):
    assert dates_of([cell])[0] == [expected and pd.Timestamp(expected)]


def test_may_is_a_name_and_its_own_abbreviation():
    assert None not in dates_of(["01-May-2000", "01-Jan-2000"])[0]
    assert None not in dates_of(["May 1, 2000", "January 1, 2000"])[0]


def test_offsets_from_utc():
    local, notes = dates_of(["2024-01-01T23:00+05:30", "2024-01-02T23:00+05:30"])
    assert (local[0], notes) == (pd.Timestamp("2024-01-01T23:00"), ())
    mixed, notes = dates_of(["2024-03-31T01:00:00+01:00", "2024-03-31T03:00:00+0200", "2024-03-31T02:00Z"])
    assert [date.hour for date in mixed] == [0, 1, 2]
    assert "several UTC offsets" in notes[0]


def test_what_columns_look_like():
    def dates(*cells: str | float) -> bool:
        return looks_like_dates(pd.Series(cells, dtype=object))

    def numbers(*cells: str | float) -> bool:
        return looks_like_numbers(pd.Series(cells, dtype=object))

    assert not dates("2024-01-05", "x", "y")
    assert dates("20240105", "20240106", np.nan)
    assert dates("05/06/2024")  # a date, whichever of the two it is
    assert not any((dates("2024", "2025"), dates("1.5"), dates("north"), dates("Mon", "Tue")))
    assert numbers(np.nan)
    assert numbers("1,5", "2", "x")
    assert not numbers("x", "y", "2")
