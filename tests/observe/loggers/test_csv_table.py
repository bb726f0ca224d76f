import csv
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wellfed
from wellfed.observe.loggers import csv_table
from wellfed.observe.loggers.csv_table import CsvTable, column

WITH_SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}


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


@given(st.floats(0, 1e7))
def test_times_keep_their_milliseconds(seconds):
    assert abs(float(csv_table.cell(seconds)) - seconds) <= 0.0006


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_in_its_place_is_reported(tmp_path):
    errors = []
    os.mkfifo(tmp_path / "t.csv")
    made = table(tmp_path / "t.csv", errors=errors)
    made.append({"step": 1, "value": 1})
    made.flush()
    assert [error.errno for error in errors] == [errno.ENXIO]


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20])
def test_rows_behind_a_long_line_of_zeros_stay(tmp_path, size):
    path = tmp_path / "t.csv"
    written(path, {"step": 1, "value": 1})
    with path.open("ab") as stream:
        stream.write(bytes(size) + b"\n")
    made = table(path)
    made.append({"step": 2, "value": 2})
    made.flush()
    assert table(path).cut_after("step", 9) == 1
    assert rows(path) == [["step", "value"], ["1", "1"], ["2", "2"]]


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


def test_how_long_rows_are_held_back_may_be_chosen(tmp_path):
    made = CsvTable(tmp_path / "t.csv", ("step",), [].append, flush_s=0)
    for step in range(3):
        made.append({"step": step})
        assert len(rows(tmp_path / "t.csv")) == 2 + step


def test_rows_that_are_added_together_are_written_together(tmp_path, monkeypatch):
    writes, write = [], os.write
    monkeypatch.setattr(
        csv_table.os, "write", lambda descriptor, data: writes.append(bytes(data)) or write(descriptor, data)
    )
    CsvTable(tmp_path / "t.csv", ("step",), [].append, flush_s=0).append({"step": 1}, {"step": 2})
    assert writes == [b"step\n1\n2\n"]


def test_rows_of_several_threads_are_written_once_each(tmp_path, at_once):
    """Two threads append, one flushes, one calls cut_after without effect."""
    num, made = 300, table(tmp_path / "t.csv")

    def add(name):
        return lambda number: made.append({"step": number, "value": name})

    at_once(num, add("a"), add("b"), lambda number: made.flush(), lambda number: made.cut_after("step", num))
    made.flush()
    found = rows(tmp_path / "t.csv")[1:]
    for name in "ab":
        assert [int(step) for step, value in found if value == name] == list(range(num))
    assert len(found) == 2 * num


def test_a_row_that_comes_while_the_table_is_cut_comes_after(tmp_path, monkeypatch):
    made = CsvTable(tmp_path / "t.csv", ("step",), [].append, flush_s=0)
    made.append({"step": 1}, {"step": 9})
    adding = threading.Thread(target=lambda: made.append({"step": 2}))
    write = csv_table.write_atomically

    def write_late(path, text):
        adding.start()
        adding.join(0.05)
        write(path, text)

    monkeypatch.setattr(csv_table, "write_atomically", write_late)
    made.cut_after("step", 5)
    adding.join()
    assert rows(tmp_path / "t.csv") == [["step"], ["1"], ["2"]]


def test_nothing_to_write_makes_no_file(tmp_path):
    table(tmp_path / "t.csv").flush()
    assert not (tmp_path / "t.csv").exists()


def test_a_full_disk_is_told_and_the_rows_are_kept_for_the_next_try(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    path, errors = tmp_path / "t.csv", []
    path.symlink_to("/dev/full")
    made = table(path, errors=errors)
    made.append({"step": 1, "value": 1})
    made.flush()
    assert [error.errno for error in errors][:1] == [28]
    path.unlink()
    made.append({"step": 2, "value": 2})
    made.flush()
    assert rows(path) == [["step", "value"], ["1", "1"], ["2", "2"]]


FULL = """
import resource, signal, sys
from pathlib import Path
from wellfed.observe.loggers.csv_table import CsvTable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
errors, path = [], Path(sys.argv[1])
table = CsvTable(path, ("step", "value"), errors.append)
table.append({"step": 1, "value": "a" * 50})
table.flush()
whole = path.read_bytes()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 30, hard))
for step in (2, 3):
    table.append({"step": step, "value": "b" * 50})
    table.flush()
    assert path.read_bytes() == whole, path.read_bytes()
assert len(errors) == 2
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
table.flush()
"""


def test_a_disk_that_fills_in_the_middle_of_a_row_leaves_no_half_row(tmp_path):
    """A file size limit stands in for the disk: part of the text is written, then the write fails."""
    path = tmp_path / "t.csv"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, env=WITH_SOURCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row[0] for row in rows(path)] == ["step", "1", "2", "3"]


def test_rows_after_a_step_are_cut(tmp_path):
    path = tmp_path / "t.csv"
    written(path, *({"step": step, "value": f"x,{step}"} for step in range(1, 6)))
    table(path).cut_after("step", 3)
    assert rows(path) == [["step", "value"], ["1", "x,1"], ["2", "x,2"], ["3", "x,3"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.csv"]


@settings(max_examples=60)
@given(cut=st.integers(1, 40), last=st.integers(0, 7))
def test_a_line_torn_anywhere_goes_and_no_other(tmp_path_factory, cut, last):
    path = tmp_path_factory.mktemp("torn") / "t.csv"
    entries = [{"step": step, "value": 0.12345 + step} for step in range(1, 6)]
    whole = written(path, *entries)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    kept = data[:-cut].count(b"\n") - 1
    table(path).cut_after("step", last)
    assert rows(path) == whole[: 1 + min(kept, last)]


def test_what_a_power_cut_leaves_is_dropped(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"step,value\n1,2\n\x00\x00\x00,\x00\n\xff\xfe,3\n,4\nnan,5\n2,6\n2,3,4\n\x00\x00\x00\x00")
    table(path).cut_after("step", 9)
    assert rows(path) == [["step", "value"], ["1", "2"], ["2", "6"]]


@pytest.mark.parametrize("text", ["", "step,val"])
def test_a_file_without_a_whole_line_is_left_alone(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    table(path).cut_after("step", 0)
    assert path.read_text() == text
    table(tmp_path / "none.csv").cut_after("step", 0)
    assert not (tmp_path / "none.csv").exists()


def test_a_table_of_an_earlier_version_gets_the_columns_that_it_lacked(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step,gone,value\n1,7,2\n2,7,\n3,7,4\n")
    made = table(path, ("step", "value", "new"))
    made.cut_after("step", 2)
    made.append({"step": 3, "new": 9})
    made.flush()
    assert rows(path) == [["step", "value", "new"], ["1", "2", ""], ["2", "", ""], ["3", "", "9"]]


@pytest.mark.parametrize(
    ("content", "kept", "damaged"),
    [
        ("step,vaXue\n1,2\n2,3\n9,9\n", [["1", "2"], ["2", "3"]], 1),
        ("st\x00p,value\n1,2\n2,3\n", [["1", "2"], ["2", "3"]], 1),
        ("\x00\x00\x00\x00\n1,2\n", [["1", "2"]], 1),
        ('step,value\n1,"2\n2,3\n', [["2", "3"]], 1),
        ("step,value\n1,2\nx,3\n1\n2,4\n", [["1", "2"], ["2", "4"]], 2),
        ("step,value\n1,2\n2,4", [["1", "2"]], 0),
        ("step,value\n" + "nan,1\n" + "1,2\n", [["1", "2"]], 1),
        ("step,value\n" + "\x00" * 200_000 + "\n1,2\n", [["1", "2"]], 1),
    ],
)
def test_damaged_lines_are_left_out_and_counted(
    tmp_path: Path, content: str, kept: list[list[str]], damaged: int
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(content)
    assert table(path).cut_after("step", 5) == damaged
    assert rows(path) == [["step", "value"], *kept]
    assert column(path, "step") == [float(row[0]) for row in kept]
    assert column(path, "none") == []
