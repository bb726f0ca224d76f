from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from wellfed import DataError
from workloads.forecast.read_csv import read_csv
from workloads.forecast.series import SeriesSet

DAYS = [str(np.datetime64("2024-01-28") + np.timedelta64(day, "D")) for day in range(40)]
Read = Callable[..., SeriesSet]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes text or bytes into a file, and reads that."""

    def reading(content: str | bytes, **arguments) -> SeriesSet:
        file = tmp_path / "sales.csv"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_csv(file, **arguments)

    return reading


def wide(dates: Sequence[str] = DAYS, separator: str = ",", number: Callable[[float], str] = str) -> str:
    """10.5, 11.5, ... in a column of sales."""
    rows = [f"{date}{separator}{number(10.5 + row)}" for row, date in enumerate(dates)]
    return "\n".join([f"date{separator}sales", *rows]) + "\n"


def long(stores: Sequence[str] = ("north", "south", "west")) -> str:
    rows = [f"{date},{store},{10 * place + day}" for place, store in enumerate(stores) for day, date in enumerate(DAYS)]
    return "\n".join(["date,store,sales", *rows]) + "\n"


def is_plain(found: SeriesSet) -> bool:
    return (
        found.names == ["sales"]
        and found.values[0].tolist() == [10.5 + row for row in range(40)]
        and str(found.frequency.dates(np.array(found.starts))[0])[:10] == DAYS[0]
        and found.frequency.name == "1 day"
    )


def comma(number: float) -> str:
    return str(number).replace(".", ",")


WRITTEN = {
    "as it should be": wide(),
    "byte order mark": b"\xef\xbb\xbf" + wide().encode(),
    "Windows line ends": wide().replace("\n", "\r\n"),
    "semicolons, decimal commas": wide(separator=";", number=comma),
    "tabs": wide(separator="\t"),
    "what Excel writes": "sep=;\r\n" + wide(separator=";").replace("\n", "\r\n"),
    "with the time": wide([f"{day}T00:00:00" for day in DAYS]),
    "day first": wide(["/".join(reversed(day.split("-"))) for day in DAYS]),
    "month first": wide(["{1}/{2}/{0}".format(*day.split("-")) for day in DAYS]),
}


@pytest.mark.parametrize("content", WRITTEN.values(), ids=WRITTEN)
def test_a_series_is_read_however_it_is_written(read: Read, content: str | bytes):
    assert is_plain(read(content))


REFUSED = {
    "one row": ("date,v\n2024-01-01,3\n", "line 2: .*only date"),
    "no header": (wide().partition("\n")[2], "line 1: the header line is missing"),
    "two values of a date": (wide() + "2024-01-30,7\n", "line 42: .* twice.*series_column=NAME"),
    "no dates": ("a,b\n1,2\n2,3\n", "no column holds dates"),
    "day or month": (wide(["01/02/2024", "01/03/2024"]), "01/02/2024 may have .*day_first"),
    "several columns": (long().replace("\n", ",2\n").replace("sales,2", "sales,price"), "several columns.*target=NAME"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_meant_is_refused_with_its_place(read: Read, content: str | bytes, message: str):
    with pytest.raises(DataError, match=rf"(?s)sales\.csv.*{message}"):
        read(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"date_column": "day"}, r"no column 'day'. Write workload.data.date_column=NAME with one of 'date', 'store'"),
        ({"target": "sale"}, r"no column 'sale'. Write workload.data.target=NAME"),
        ({"date_column": "store"}, "120 of 120 cells of column 'store' are no dates, such as 'north' in line 2"),
    ],
)
def test_columns_that_are_not_there_or_not_so(read: Read, arguments: dict[str, str], message: str):
    with pytest.raises(DataError, match=message):
        read(long(), **arguments)


BAD = {
    "a word": ("2024-03-08,many", "'many' in column 'sales' is no number"),
    "a day that is not": ("2024-02-30,5", "'2024-02-30' in column 'date' is no date"),
    "no date": (",5", "no date"),
}


@pytest.mark.parametrize(("row", "reason"), BAD.values(), ids=BAD)
def test_a_bad_row_is_skipped_with_a_note_of_its_place_up_to_the_limit(read: Read, row: str, reason: str):
    found = read(wide() + row + "\n")
    assert is_plain(found)
    assert f"1 bad row skipped, in whole or in part, such as line 42: {reason}" in found.notes[-1]
    with pytest.raises(DataError, match=rf"max_bad_rows=1, such as line 42: {reason}"):
        read(wide() + f"{row}\n{row}\n", max_bad_rows=1)


def test_one_series_a_column(read: Read):
    content = "day,a,b,weather\n" + "".join(f"{day},{row},{-row},sun\n" for row, day in enumerate(DAYS))
    found = read(content)
    assert (found.names, found.values[1][3]) == (["a", "b"], -3)
    assert found.notes == ("sales.csv: dates of 'day', values of 'a', 'b'; left out 'weather'",)
    assert read(content, target="B").names == ["b"]
    assert read(content, target=["b", "a"]).names == ["b", "a"]
    assert read(content, target=["b", "B"]).names == ["b"]


@pytest.mark.parametrize("arguments", [{}, {"series_column": "Store", "target": "sales", "date_column": "date"}])
def test_one_series_below_the_other(read: Read, arguments: dict[str, str]):
    found = read(long(), **arguments)
    assert found.names == ["north", "south", "west"]
    assert [values[:2].tolist() for values in found.values] == [[0, 1], [10, 11], [20, 21]]
    assert found.notes == ("sales.csv: dates of 'date', values of 'sales', a series for each 'store'",)


def test_series_of_unequal_length_with_gaps(read: Read):
    days = np.array(DAYS)
    rows = [("a", 0, 30), ("b", 10, 40), ("c", 5, 20)]
    lines = [f"{day},{name},1" for name, first, last in rows for day in days[first:last] if day != DAYS[15]]
    found = read("date,store,sales\n" + "\n".join(lines))
    assert (found.starts, [len(values) for values in found.values]) == ([0, 10, 5], [30, 30, 15])
    assert [int(np.isnan(values).sum()) for values in found.values] == [1, 1, 1]
    empty = "date,a,b\n" + "".join(f"{day},{row if 3 < row < 20 else ''},NA\n" for row, day in enumerate(DAYS))
    found = read(empty)
    assert (found.names, found.starts, len(found.values[0])) == (["a"], [4], 16)
    assert found.notes[-1] == "1 of 2 series without any value left out, the first: b"
