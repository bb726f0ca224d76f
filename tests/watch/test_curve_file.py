import pytest

from tests.kit.seen import sample
from tests.kit.tables import rows_of
from wellfed.errors import ConfigError
from wellfed.observe.telemetry.metrics import METRICS
from wellfed.observe.telemetry.series import HOST
from wellfed.watch import curve_file


def test_a_row_a_reading_is_on_disk_at_once(tmp_path):
    path = tmp_path / "curves.csv"
    table = curve_file.new_file(path, print)
    samples = [sample(0.5, 0, {"util_pct": 63.0, "power_w": 350.0}), sample(0.5, HOST, {"cpu_pct": 12.5})]
    table.append(*curve_file.rows_of(samples))
    first, second = rows_of(path)
    assert list(first) == ["timestamp", "time_s", "gpu", *METRICS]
    known = {name: cell for name, cell in first.items() if cell and name != "timestamp"}
    assert known == {"time_s": "0.5", "gpu": "0", "util_pct": "63", "power_w": "350"}
    assert (second["gpu"], second["cpu_pct"], second["util_pct"]) == ("-1", "12.5", "")


def test_a_file_that_is_there_is_not_touched(tmp_path):
    path = tmp_path / "curves.csv"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        curve_file.new_file(path, print)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="can't be written"):
        curve_file.new_file(tmp_path / "absent" / "curves.csv", print)


def test_a_file_that_can_not_be_written_is_told_once(tmp_path):
    told, path = [], tmp_path / "curves.csv"
    table = curve_file.new_file(path, told.append)
    path.unlink()
    path.mkdir()
    for second in range(3):
        table.append(*curve_file.rows_of([sample(float(second), 0, {"util_pct": 1.0})]))
    assert len(told) == 1
    assert "lacks readings" in told[0]
