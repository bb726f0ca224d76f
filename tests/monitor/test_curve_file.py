from datetime import UTC, datetime

import pytest

from tests.kit.seen import sample
from tests.kit.tables import rows_of
from wellfed.errors import ConfigError
from wellfed.monitor.curve_file import new_file
from wellfed.monitor.curve_file import rows_of as rows_for
from wellfed.observe.telemetry.metrics import METRICS
from wellfed.observe.telemetry.series import HOST


def test_a_row_a_reading_is_on_disk_at_once(tmp_path):
    path = tmp_path / "curves.csv"
    file = new_file(path, print)
    file.append(*rows_for([sample(0.5, 0, {"util_pct": 63.0, "power_w": 350.0}), sample(0.5, HOST, {"cpu_pct": 12.5})]))
    first, second = rows_of(path)
    assert list(first) == ["timestamp", "time_s", "gpu", *METRICS]
    age_s = (datetime.now(UTC) - datetime.fromisoformat(first["timestamp"])).total_seconds()
    assert -1 < age_s < 60
    known = {name: cell for name, cell in first.items() if cell and name != "timestamp"}
    assert known == {"time_s": "0.5", "gpu": "0", "util_pct": "63", "power_w": "350"}
    assert (second["gpu"], second["cpu_pct"], second["util_pct"]) == ("-1", "12.5", "")
    file.append(*rows_for([sample(1.0, 0, {"util_pct": 64.0})]))
    assert len(rows_of(path)) == 3


def problem(path):
    with pytest.raises(ConfigError) as raised:
        new_file(path, print)
    return str(raised.value)


def test_a_file_that_is_there_is_not_touched(tmp_path):
    path = tmp_path / "curves.csv"
    path.write_text("mine")
    assert f"--csv {path}: is there already" in problem(path)
    assert path.read_text() == "mine"
    assert "can't be written" in problem(tmp_path / "absent" / "curves.csv")


def test_a_file_that_can_not_be_written_is_told_once(tmp_path):
    told, path = [], tmp_path / "curves.csv"
    file = new_file(path, told.append)
    path.unlink()
    path.mkdir()
    for second in range(3):
        file.append(*rows_for([sample(float(second), 0, {"util_pct": 1.0})]))
    assert len(told) == 1
    assert "lacks readings" in told[0]
