import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workloads.forecast.steps import DAY, HOUR, Frequency, UnevenDates, infer_frequency, parse_frequency

FIRST = np.datetime64("2023-11-30T06:00", "us")
FREQUENCIES = {
    "second": Frequency("time", 1_000_000, FIRST),
    "quarter of an hour": Frequency("time", HOUR // 4, FIRST),
    "hour": Frequency("time", HOUR, FIRST),
    "day": Frequency("time", DAY, FIRST),
    "week": Frequency("time", 7 * DAY, FIRST),
    "business day": Frequency("business", 1, FIRST),
    "month": Frequency("months", 1, FIRST, day=15),
    "end of the month": Frequency("months", 1, FIRST, day=31),
    "quarter": Frequency("months", 3, FIRST, day=1),
    "year": Frequency("months", 12, FIRST, day=30),
}


@settings(max_examples=60, deadline=None)
@given(frequency=st.sampled_from(list(FREQUENCIES.values())), start=st.integers(-50, 50), data=st.data())
def test_a_frequency_is_found_again_with_steps_left_out(frequency: Frequency, start: int, data: st.DataObject):
    left_out = data.draw(st.sets(st.integers(3, 28)))
    numbers = np.array([start + step for step in range(31) if step not in left_out])
    dates = frequency.dates(numbers)
    # Days without any weekend can't be told from business days.
    assume(frequency.kind == "business" or frequency.every != DAY or not np.is_busday(dates.astype("M8[D]")).all())
    assert frequency.numbers(dates).tolist() == numbers.tolist()
    found = infer_frequency(dates)
    again = found.numbers(dates)
    assert found.dates(again).tolist() == dates.tolist()
    assert (again - again[0]).tolist() == (numbers - numbers[0]).tolist()
    assert found.season == frequency.season


@pytest.mark.parametrize(
    ("word", "name", "season"),
    [
        ("s", "1 second", 3600),
        ("15min", "15 minutes", 96),
        ("h", "1 hour", 24),
        ("2H", "2 hours", 12),
        ("5h", "5 hours", 1),
        ("D", "1 day", 7),
        ("2D", "2 days", 1),
        ("B", "1 business day", 5),
        ("W", "1 week", 52),
        ("W-SUN", "1 week", 52),
        ("MS", "1 month", 12),
        ("ME", "1 month", 12),
        ("q", "3 months", 4),
        ("5M", "5 months", 1),
        ("Y", "1 year", 1),
        ("ms", "0.001 seconds", 1),
    ],
)
def test_frequencies_have_words_names_and_seasons(word: str, name: str, season: int):
    found = parse_frequency(word, FIRST)
    assert (found.name, found.season) == (name, season)


def test_dates_that_are_not_even_name_the_first_that_is_off():
    dates = np.array(["2024-01-01", "2024-01-02", "2024-01-03T12:00", "2024-01-04"], dtype="M8[us]")
    with pytest.raises(UnevenDates, match="most are 12 hours apart|most are 1 day apart") as caught:
        infer_frequency(np.append(dates, np.datetime64("2024-01-05T01:00")))
    assert caught.value.date == np.datetime64("2024-01-05T01:00")
