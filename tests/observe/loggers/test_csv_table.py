import csv
import resource
import signal

import pytest

from wellfed.observe.loggers import csv_table
from wellfed.observe.loggers.csv_table import CsvTable


def table(path, columns=("step", "value"), errors=None):
    return CsvTable(path, columns, [].append if errors is None else errors.append)


def rows(path):
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


def written(path, *entries, **more):
    made = table(path, **more)
    for entry in entries:
        made.append(entry)
    made.flush()
    return rows(path)


def test_columns_in_order_and_empty_where_there_is_no_value(tmp_path):
    found = written(tmp_path / "t.csv", {"value": 2, "step": 1, "other": 9}, {"step": 2}, {"step": 3, "value": None})
    assert found == [["step", "value"], ["1", "2"], ["2", ""], ["3", ""]]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (True, "1"), (False, "0"), (0.1234567, "0.123457"), (1e-9, "1e-09"), (12345.6789, "12345.679"),
        (1e6 + 1 / 3, "1000000.333"), (float("nan"), "nan"), (float("-inf"), "-inf"), (10**12, str(10**12)),
        ("a,b", "a,b"),
    ],
)  # fmt: skip
def test_a_cell(tmp_path, value, cell):
    assert written(tmp_path / "t.csv", {"step": 1, "value": value})[1][1] == cell


def test_one_head_however_often_it_is_opened(tmp_path):
    written(tmp_path / "t.csv", {"step": 1, "value": 1})
    assert written(tmp_path / "t.csv", {"step": 2, "value": 2}) == [["step", "value"], ["1", "1"], ["2", "2"]]


def test_rows_are_held_back_for_a_second(tmp_path, monkeypatch):
    now_s = [10.0]
    monkeypatch.setattr(csv_table.time, "monotonic", lambda: now_s[0])
    made = table(tmp_path / "t.csv")
    made.append({"step": 1})
    assert not (tmp_path / "t.csv").exists()
    now_s[0] += 1.01
    made.append({"step": 2})
    assert len(rows(tmp_path / "t.csv")) == 3


def to_step(last):
    return lambda row: int(row["step"]) <= last


def test_rows_of_several_threads_are_written_once_each(tmp_path, at_once):
    """Two threads append, one flushes, one drops nothing."""
    num, made = 300, table(tmp_path / "t.csv")

    def add(name):
        return lambda number: made.append({"step": number, "value": name})

    at_once(num, add("a"), add("b"), lambda number: made.flush(), lambda number: made.keep(to_step(num)))
    made.flush()
    found = rows(tmp_path / "t.csv")[1:]
    for name in "ab":
        assert [int(step) for step, value in found if value == name] == list(range(num))
    assert len(found) == 2 * num


def test_a_full_disk_is_reported_and_leaves_no_half_row(tmp_path, monkeypatch):
    """A file size limit stands in for the disk: part of the text is written."""
    path, errors = tmp_path / "t.csv", []
    made = table(path, errors=errors)
    written(path, {"step": 1, "value": "a" * 50})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, hard))
    try:
        made.append({"step": 2, "value": "b" * 50})
        made.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(errors) == 1
    made.append({"step": 3, "value": 3})
    made.flush()
    assert [row[0] for row in rows(path)] == ["step", "1", "3"]


def test_rows_after_a_step_are_dropped_with_a_torn_last_line(tmp_path):
    path = tmp_path / "t.csv"
    written(path, *({"step": step, "value": f"x,{step}"} for step in range(1, 6)))
    with path.open("a") as stream:
        stream.write("2,x")
    table(path).keep(to_step(3))
    assert rows(path) == [["step", "value"], ["1", "x,1"], ["2", "x,2"], ["3", "x,3"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.csv"]
    table(tmp_path / "none.csv").keep(to_step(3))
