import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellfed import DataError
from workloads.forecast.read_csv import read_csv
from workloads.forecast.series import SeriesSet
from workloads.forecast.text_table import read_text_table

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
    "old Mac line ends": wide().replace("\n", "\r"),
    "no last line end": wide().rstrip(),
    "semicolons": wide(separator=";"),
    "semicolons, decimal commas": wide(separator=";", number=comma),
    "tabs": wide(separator="\t"),
    "tabs, decimal commas": wide(separator="\t", number=comma),
    "bars": wide(separator="|"),
    "commas, decimal commas in quotes": wide(number=lambda number: f'"{comma(number)}"'),
    "all in quotes": "".join(",".join(f'"{cell}"' for cell in line.split(",")) + "\n" for line in wide().splitlines()),
    "UTF-16": wide().encode("utf-16"),
    "UTF-16, tabs, big end first": b"\xfe\xff" + wide(separator="\t").encode("utf-16-be"),
    "blanks around": wide().replace(",", " , "),
    "blank lines": wide().replace("\n", "\n\n"),
    "blank cells at the end": wide() + ",\n,\n",
    "a separator at each line's end": wide().replace("\n", ",\n"),
    "comments": "# made by hand\n\n" + wide(),
    "what Excel writes": "sep=;\r\n" + wide(separator=";").replace("\n", "\r\n"),
    "with the time": wide([f"{day}T00:00:00" for day in DAYS]),
    "with blank and time": wide([f"{day} 0:00" for day in DAYS]),
    "in UTC": wide([f"{day}T00:00:00Z" for day in DAYS]),
    "in one time zone": wide([f"{day}T00:00:00+02:00" for day in DAYS]),
    "in two time zones": wide([f"{d}T0{1 + (n > 20)}:00:00+0{1 + (n > 20)}:00" for n, d in enumerate(DAYS)]),
    "slashes": wide([day.replace("-", "/") for day in DAYS]),
    "day first": wide(["/".join(reversed(day.split("-"))) for day in DAYS]),
    "points": wide([".".join(reversed(day.split("-"))) for day in DAYS]),
    "month first": wide(["{1}/{2}/{0}".format(*day.split("-")) for day in DAYS]),
    "without zeros": wide([day.replace("-0", "-") for day in DAYS]),
    "digits": wide([day.replace("-", "") for day in DAYS]),
    "names of months": wide([np.datetime64(day).item().strftime("%d %b %Y") for day in DAYS]),
    "upside down": "\n".join([wide().splitlines()[0], *wide().splitlines()[:0:-1]]),
    "a row twice": wide() + wide().splitlines()[-1],
    "a column that counts rows": "".join(f"{n or ''},{line}\n" for n, line in enumerate(wide().splitlines())),
}


@pytest.mark.parametrize("content", WRITTEN.values(), ids=WRITTEN)
def test_a_series_is_read_however_it_is_written(read: Read, content: str | bytes):
    assert is_plain(read(content))


REFUSED = {
    "one row": ("date,v\n2024-01-01,3\n", r"line 2: 2024-01-01 is the only date"),
    "a header alone": ("date,v\n", r"has a header line \(date, v\) and no rows under it"),
    "nothing": ("", "is empty"),
    "blank lines": (" \n\n", "is empty"),
    "no header": (wide().partition("\n")[2], r"line 1: the header line is missing.*'2024-01-28'"),
    "dates side by side": ("store,2024-01-01,2024-01-02\na,1,2\n", "line 1: .* dates stand side by side"),
    "one column": ("date\n2024-01-01\n", "line 1: one column alone: 'date'"),
    "a name twice": ("date,v,v\n2024-01-01,1,2\n", "line 1: the column name 'v' occurs twice"),
    "two values of a date": (
        wide() + "2024-01-30,7\n",
        r"line 42: 'sales' has 2024-01-30 twice: 12.5 \(line 4\) and 7\. .*series_column=NAME",
    ),
    "no dates": ("a,b\n1,2\n2,3\n", "no column holds dates; there are 'a', 'b'"),
    "no readable date": ("date,b\nx,2\ny,3\n", "2 of 2 cells of column 'date' are no dates, such as 'x' in line 2"),
    "no number in the column": ("date,sales\n2024-01-01,$1\n2024-01-02,$2\n", "no column of numbers beside the dates"),
    "no values": ("date,b\n2024-01-01,\n2024-01-02,NA\n", "no value in 'b'"),
    "words": ("date,b\n2024-01-01,x\n2024-01-02,y\n", "no column of numbers beside the dates"),
    "a date between": (
        wide([*DAYS, "2024-05-01 13:00"]),
        r"line 42: the dates are not even: most are 1 day apart.*2024-05-01 13:00:00.*frequency=D",
    ),
    "a wrong century": (wide([*DAYS, "2924-03-01"]), r"to 2924-03-01 \(line 42\) there are 328,752 steps of 1 day"),
    "some with an offset": (
        wide([f"{day}T01:00:00{'Z' * (row > 3)}" for row, day in enumerate(DAYS)]),
        r"Some dates have a UTC offset \(2024-02-01T01:00:00Z\), and others none \(2024-01-28T01:00:00\)",
    ),
    "day or month": (wide(["01/02/2024", "01/03/2024"]), "01/02/2024 may have the day or the month first.*day_first"),
    "tenths or thousands": (wide(number=lambda x: f'"1,{int(x):03}"'), "Values such as 1,010 may have .*decimal"),
    "commas within dates": (
        wide([np.datetime64(day).item().strftime("%b %d, %Y") for day in DAYS]),
        "40 of 40 rows can't be read, such as line 2: 3 cells instead of 2",
    ),
    "an open quote": (wide() + '2024-03-08,"3\n2024-03-09,4\n', "line 42: a cell in quotes does not end"),
    "seconds since 1970": (
        wide([str(np.datetime64(day, "s").astype(int)) for day in DAYS]),
        "40 of 40 cells of column 'date' are no dates, such as '1706400000' in line 2",
    ),
    "quarters": (
        "date,sales\n2024Q1,1\n2024Q2,2\n",
        "2 of 2 cells of column 'date' are no dates, such as '2024Q1' in line 2",
    ),
    "UTF-16 without a mark": (wide().encode("utf-16-le"), "line 1: a zero byte"),
    "a zero byte": (b"date,v\n2024-01-01,\x003\n2024-01-02,3\n", "line 2: a zero byte"),
    "a gzip file": (b"\x1f\x8b\x08\x00", "is compressed"),
    "a workbook": (b"PK\x03\x04\x14", "is a workbook"),
    "several columns": (
        long().replace("\n", ",2\n").replace("sales,2", "sales,price"),
        r"several columns of numbers \('sales', 'price'\) beside the dates .*target=NAME",
    ),
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
        ({"series_column": "shop"}, r"no column 'shop'. Write workload.data.series_column=NAME"),
        ({"date_column": "store"}, "120 of 120 cells of column 'store' are no dates, such as 'north' in line 2"),
        ({"target": "store", "series_column": "store"}, "'store' can't be target and dates or names of series at once"),
        ({"target": ["sales", "date"], "series_column": "store"}, "several columns of numbers"),
    ],
)
def test_columns_that_are_not_there_or_not_so(read: Read, arguments: dict[str, str], message: str):
    with pytest.raises(DataError, match=message):
        read(long(), **arguments)


def test_a_file_that_is_no_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere\.csv can't be read: No such file"):
        read_csv(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="is a folder; forecast reads one file. Name a CSV file"):
        read_csv(tmp_path)
    (tmp_path / "b.csv").write_text(wide())
    with pytest.raises(DataError, match=r"is a folder.*Write workload\.data\.path=.*b\.csv"):
        read_csv(tmp_path)


BAD = {
    "a word": ("2024-03-08,many", "'many' in column 'sales' is no number"),
    "infinity": ("2024-03-08,inf", "'inf' in column 'sales' is no number"),
    "too much for a float": ("2024-03-08,1e999", "'1e999' in column 'sales' is no number"),
    "a day that is not": ("2024-02-30,5", "'2024-02-30' in column 'date' is no date"),
    "no date": (",5", "no date"),
    "a cell more": ("2024-03-08,5,6", "3 cells instead of 2"),
}


@pytest.mark.parametrize(("row", "reason"), BAD.values(), ids=BAD)
def test_a_bad_row_is_skipped_with_a_note_of_its_place_up_to_the_limit(read: Read, row: str, reason: str):
    found = read(wide() + row + "\n")
    assert is_plain(found)
    assert f"1 bad row skipped, in whole or in part, such as line 42: {reason}" in found.notes[-1]
    with pytest.raises(DataError, match=rf"max_bad_rows=1, such as line 42: {reason}"):
        read(wide() + f"{row}\n{row}\n", max_bad_rows=1)


def test_lines_are_told_as_an_editor_counts_them(read: Read):
    rows = "".join(f'{day},"two\nlines",{row}\n' for row, day in enumerate(DAYS))
    found = read(f"# first\ndate,note,sales\n{rows}hello,x,3\n")
    assert "such as line 83: 'hello'" in found.notes[-1]
    assert found.notes[0] == "sales.csv: dates of 'date', values of 'sales'; left out 'note'"
    found = read(f"# first\ndate,note,sales\n{rows}2024-03-08,x,3,4\n2024-03-08,x,3\n")
    assert "1 bad row skipped, in whole or in part, such as line 83: 4 cells instead of 3" in found.notes[-1]
    assert found.values[0][-1] == 3


def test_a_text_that_is_not_utf_8_is_read_and_told(read: Read):
    found = read(wide().replace("sales", "größe").encode("latin-1"))
    assert found.names == ["größe"]
    assert "sales.csv is not UTF-8; it was read as Windows-1252" in found.notes


def test_one_series_a_column(read: Read):
    content = "day,a,b,weather\n" + "".join(f"{day},{row},{-row},sun\n" for row, day in enumerate(DAYS))
    found = read(content)
    assert (found.names, found.values[1][3]) == (["a", "b"], -3)
    assert found.notes == ("sales.csv: dates of 'day', values of 'a', 'b'; left out 'weather'",)
    assert read(content, target="B").names == ["b"]
    assert read(content, target=["b", "a"]).names == ["b", "a"]
    assert read(content, target=["b", "B"]).names == ["b"]


def test_the_column_of_dates_is_one_that_holds_some(read: Read):
    content = "day,month,when,sales\n" + "".join(f"{row},1,{date},{row}\n" for row, date in enumerate(DAYS))
    assert read(content, target="sales").notes[0].startswith("sales.csv: dates of 'when', values of 'sales'")
    assert read("year,sales\n1990,1\n1991,2\n1993,4\n").frequency.name == "1 year"


@pytest.mark.parametrize("arguments", [{}, {"series_column": "Store", "target": "sales", "date_column": "date"}])
def test_one_series_below_the_other(read: Read, arguments: dict[str, str]):
    found = read(long(), **arguments)
    assert found.names == ["north", "south", "west"]
    assert [values[:2].tolist() for values in found.values] == [[0, 1], [10, 11], [20, 21]]
    assert found.notes == ("sales.csv: dates of 'date', values of 'sales', a series for each 'store'",)


def test_names_of_series_may_be_numbers_where_the_column_is_named_or_has_a_usual_name(read: Read):
    numbered = long(("1", "2", "10"))
    with pytest.raises(DataError, match=r"line 42: 'store' has 2024-01-28 twice: 1 \(line 2\) and 2"):
        read(numbered)
    assert read(numbered, series_column="store").names == ["1", "10", "2"]
    assert read(numbered.replace("store", "unique_id")).names == ["1", "10", "2"]
    lacking = long() + ",,5\n2024-03-08,,5\n"
    assert "2 bad rows skipped" in read(lacking).notes[-1]


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


def test_what_was_put_in_order_is_told(read: Read):
    lines = wide().splitlines()
    found = read("\n".join([*lines[:10], *lines[11:], lines[10], lines[5]]))
    assert is_plain(found)
    assert found.notes[1:] == (
        "2 rows earlier than the row before; sorted by date",
        "1 value given twice, the same each time; the second left out",
    )


def test_dates_are_rounded_down_to_a_frequency_that_is_given(read: Read):
    days = [*DAYS[:5], "2024-02-02 13:45", "2024-02-04 01:00"]
    found = read(wide(days), frequency="D")
    assert found.values[0].tolist() == [10.5, 11.5, 12.5, 13.5, 14.5, 15.5, pytest.approx(np.nan, nan_ok=True), 16.5]
    with pytest.raises(DataError, match="'sales' has 2024-02-01 and 2024-02-01 13:00:00, which are one step of 1 day"):
        read(wide([*DAYS[:5], "2024-02-01 13:00"]), frequency="D")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("any")


cells = st.one_of(
    st.sampled_from(["", "NA", "x", "1,5", '"1,5"', "1.5", "-3", "1e3", "2024-01-05", "05/06/2024", '"', "\x00", "é"]),
    st.text(max_size=5),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(cells, max_size=4), max_size=8), separator=st.sampled_from([",", ";", "\t"]))
def test_whatever_is_in_a_file_it_is_read_or_refused(folder: Path, rows, separator: str):
    file = folder / "any.csv"
    text = "\n".join(separator.join(row) for row in [["date", "v"], *rows])
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(DataError):
        found = read_csv(file)
        assert all(len(values) and not np.isnan(values[[0, -1]]).any() for values in found.values)


def test_series_that_two_columns_name_are_refused_with_the_way_out(read: Read):
    content = "date,shop,item,sales\n" + "".join(
        f"{day},s{row % 4 // 2},i{row % 2},{row}\n" for day in DAYS for row in range(4)
    )
    for arguments in ({}, {"series_column": "shop"}):
        with pytest.raises(DataError, match=r"line 3: .* twice.*series_column=NAME .*\(join two where it takes two\)"):
            read(content, **arguments)


def local_hours(begin: str, end: str, every_min: int, set_back_at: str, by_min: int = 60) -> list[str]:
    """Dates as a clock on the wall shows them that is set back at ``set_back_at`` and forward six months before."""
    utc = np.arange(np.datetime64(begin, "m"), np.datetime64(end, "m"), np.timedelta64(every_min, "m"))
    back = np.datetime64(set_back_at, "m")
    forward = back - np.timedelta64(210, "D")
    shift = np.where((utc >= forward) & (utc < back), by_min, 0)
    return [str(date).replace("T", " ") for date in utc + shift.astype("m8[m]")]


@pytest.mark.parametrize("order", ["as the clock showed them", "sorted by date", "the file twice"])
@pytest.mark.parametrize(
    ("every_min", "set_back_at", "by_min"),
    [
        (60, "2024-10-27T02:00", 60),
        (30, "2024-10-27T01:00", 60),
        (15, "2024-11-03T01:00", 60),
        (30, "2024-04-07T01:30", 30),
        (60, "2024-02-17T23:00", 60),
    ],
)
def test_the_hour_that_autumn_has_twice_is_averaged(
    read: Read, order: str, every_min: int, set_back_at: str, by_min: int
):
    back = np.datetime64(set_back_at, "m")
    dates = local_hours(
        str(back - np.timedelta64(9, "D")), str(back + np.timedelta64(9, "D")), every_min, set_back_at, by_min
    )
    lines = [f"{date},{row}" for row, date in enumerate(dates)]
    if order == "sorted by date":
        lines.sort(key=lambda line: line.split(",")[0])
    found = read("\n".join(["date,load", *lines, *(lines if order == "the file twice" else [])]))
    doubled = by_min // every_min
    values, num = found.values[0], len(dates) - doubled
    first = dates.index(str(back).replace("T", " "))
    assert len(values) == num
    assert not np.isnan(values).any()
    assert values[:first].tolist() == list(range(first))
    assert values[first : first + doubled].tolist() == [first + row + doubled / 2 for row in range(doubled)]
    assert values[first + doubled :].tolist() == list(range(first + 2 * doubled, len(dates)))
    name = str(back).replace("T", " ") + ":00"
    noun = "value" if doubled == 1 else "values"
    told = f"{doubled} {noun} of an hour that a clock change gives twice, averaged with the first; the first: load, "
    assert told + name in found.notes
    assert any("earlier than the row before" in note for note in found.notes) == (order == "the file twice")


def test_the_hour_that_spring_lacks_is_a_gap_of_two_years_of_hours(read: Read):
    dates = local_hours("2023-01-01T00:00", "2023-12-01T00:00", 60, "2023-10-29T02:00")
    found = read("date,load,solar\n" + "\n".join(f"{date},{row},{-row}" for row, date in enumerate(dates)))
    assert [int(np.isnan(values).sum()) for values in found.values] == [1, 1]
    assert [len(values) for values in found.values] == [len(dates)] * 2
    assert found.notes[1].startswith("2 values of an hour that a clock change gives twice")


@pytest.mark.parametrize(
    "doubled",
    [
        ["2024-10-27 12:00"],
        ["2024-10-27 02:00", "2024-10-30 02:00"],
        ["2024-10-27 01:00", "2024-10-27 02:00"],
        ["2024-10-27 02:00", "2024-10-27 02:00"],
    ],
    ids=["at noon", "twice a week", "two hours", "three times"],
)
def test_other_doubled_hours_are_refused(read: Read, doubled: list[str]):
    dates = local_hours("2024-10-20T00:00", "2024-11-05T00:00", 60, "2025-10-27T02:00")
    lines = [f"{date},{row}" for row, date in enumerate([*dates, *doubled])]
    with pytest.raises(DataError, match=r"'load' has 2024-10-2\d \d\d:00:00 twice.*If a clock was set back"):
        read("\n".join(["date,load", *sorted(lines, key=lambda line: line[:16])]))


def test_a_named_pipe_is_no_table(tmp_path):
    """To open one waits for its writer."""
    os.mkfifo(tmp_path / "x.csv")
    with pytest.raises(DataError, match=r"x\.csv is a named pipe, not a file"):
        read_text_table(tmp_path / "x.csv", 0)
