import datetime

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.forecast.cells import Unclear, looks_like_numbers, parse_dates, parse_numbers


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
