import errno
import os
from datetime import UTC, datetime

import pytest

from tests.kit.seen import sample
from tests.kit.tables import rows_of
from wellfed.errors import ConfigError
from wellfed.monitor.curve_file import CurveFile
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.metrics import METRICS


def test_a_row_a_reading_is_on_disk_at_once(tmp_path):
    path = tmp_path / "curves.csv"
    file = CurveFile(path, print)
    file.add([sample(0.5, 0, {"util_pct": 63.0, "power_w": 350.0}), sample(0.5, HOST, {"cpu_pct": 12.5})])
    first, second = rows_of(path)
    assert list(first) == ["timestamp", "time_s", "gpu", *METRICS]
    age_s = (datetime.now(UTC) - datetime.fromisoformat(first["timestamp"])).total_seconds()
    assert -1 < age_s < 60
    known = {name: cell for name, cell in first.items() if cell and name != "timestamp"}
    assert known == {"time_s": "0.5", "gpu": "0", "util_pct": "63", "power_w": "350"}
    assert (second["gpu"], second["cpu_pct"], second["util_pct"]) == ("-1", "12.5", "")
    file.add([sample(1.0, 0, {"util_pct": 64.0})])
    assert len(rows_of(path)) == 3
    file.close()


def problem(path):
    with pytest.raises(ConfigError) as raised:
        CurveFile(path, print)
    return str(raised.value)


def test_a_file_that_is_there_is_not_touched(tmp_path):
    path = tmp_path / "curves.csv"
    path.write_text("mine")
    (tmp_path / "curves-2.csv").write_text("mine, too")
    told = problem(path)
    assert f"--csv {path}: is there already, and is not overwritten." in told
    assert f"{tmp_path / 'curves-3.csv'} is free" in told
    assert path.read_text() == "mine"


def test_where_there_can_be_no_file_it_is_told_before_anything_is_watched(tmp_path):
    assert f"there is no folder {tmp_path / 'absent'}. Run: mkdir -p" in problem(tmp_path / "absent" / "a.csv")
    assert f"is a folder. Name a file: {tmp_path / 'monitor.csv'}" in problem(tmp_path)
    if os.geteuid() == 0 and os.path.isdir("/proc/self"):  # root may write everywhere else
        told = problem(type(tmp_path)("/proc/self/a.csv"))
    else:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        told = problem(closed / "a.csv")
    assert "can't be written (" in told
    assert "Name a file in another folder." in told


@pytest.mark.parametrize("is_free_again", [True, False])
def test_a_full_disk_is_told_once_and_what_was_held_back_is_written_when_it_can_be(
    tmp_path, monkeypatch, is_free_again
):
    told, path = [], tmp_path / "curves.csv"
    file = CurveFile(path, told.append)
    file.add([sample(0.0, 0, {"util_pct": 1.0})])

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("wellfed.observe.loggers.csv_table.os.write", full)
        for second in range(1, 4):
            file.add([sample(float(second), 0, {"util_pct": 1.0})])
        if not is_free_again:
            file.close()
    assert told[0] == f"{path} can't be written (No space left on device): it is tried again, and the watching goes on."
    if is_free_again:
        file.close()
        assert len(told) == 1
        assert [row["time_s"] for row in rows_of(path)] == ["0", "1", "2", "3"]
    else:
        assert told[1:] == [f"{path} lacks the last readings: it could not be written to the end."]
        assert [row["time_s"] for row in rows_of(path)] == ["0"]
