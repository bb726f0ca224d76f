"""``python -m wellfed runs``: the newest runs in a table, damaged ones among them."""

import io
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.kit.evidence_of import evidence
from wellfed.cli import main as cli
from wellfed.record.entries import RunRecord


def made(folder: Path, name: str, workload: str = "recsys", **changes: object) -> Path:
    """Returns the folder of a run with a record."""
    run = folder / "logs" / workload / "runs" / name
    run.mkdir(parents=True)
    evidence(**{"wait_ms": 2.0, "compute_ms": 8.0, "ceiling": 1.25, "workload": workload, **changes}).record.write(run)  # type: ignore[arg-type]
    return run


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with runs of two workloads."""
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "2026-01-01_00-00-00_aaaa")
    made(tmp_path, "2026-01-03_00-00-00_cccc")
    made(tmp_path, "2026-01-02_00-00-00_bbbb", "forecast", metrics={"val/mae": 0.25})
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["runs", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_newest_come_first(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = shown(capsys)
    assert head.split()[:3] == ["run", "workload", "status"]
    assert [line[20:24] for line in rows] == ["cccc", "bbbb", "aaaa"]
    assert "forecast  ok" in rows[1]
    assert "12,673 samples/s  80.0 %" in rows[1]
    assert rows[1].endswith("val/mae 0.25")


def test_few_of_many_or_of_one_workload(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "-n", "2")[-1] == "2 of 3 runs; all: --last 3"
    (_, only) = shown(capsys, "--workload", "forecast")
    assert "bbbb" in only
    for words, told in {
        ("--workload", "forcast"): "--workload forcast: has no run in logs. There are runs of: forecast, recsys.",
        ("--last", "0"): "--last 0: is no number of runs. Write --last 20.",
        ("--log-dir", "gone"): "gone: there is no run in it yet. python src/train.py makes one.",
    }.items():
        assert cli.main(["runs", *words]) == 2
        assert told in capsys.readouterr().err


def test_a_run_that_was_killed_and_one_that_runs(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    living = RunRecord.start("r")
    made(there, "2026-01-04_00-00-00_dddd", status="running", pid=living.pid, host_name=living.host_name)
    run = made(there, "2026-01-05_00-00-00_eeee")
    living.write(run)
    statuses = [line.split()[2] for line in shown(capsys)[1:3]]
    assert statuses == ["running", "killed"]  # the latter is of another boot


def test_damaged_records_are_rows_with_what_is_wrong(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    halved, newer, closed = (made(there, f"2026-02-0{day}_x") for day in range(1, 4))
    text = (halved / "run.json").read_text()
    (halved / "run.json").write_text(text[: len(text) // 2])
    (newer / "run.json").write_text('{"schema": 3, "run_id": "x", "status": "ok"}')
    read_text = Path.read_text

    def refusing(self: Path, *words: str, **options: str) -> str:
        if self.parent == closed.relative_to(there):
            raise PermissionError(13, "Permission denied")
        return read_text(self, *words, **options)

    monkeypatch.setattr(Path, "read_text", refusing)
    text = "\n".join(shown(capsys))
    assert "has schema 3; this version of wellfed reads schema 2" in text
    assert "  Permission denied" in text
    assert "aaaa" in text
    found = json.loads("\n".join(shown(capsys, "--json")))
    assert [one["status"] for one in found[:3]] == ["damaged"] * 3
    assert found[-1]["samples_per_s"] == pytest.approx(12673, abs=1)


def test_a_terminal_of_80_columns_is_not_overrun(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wellfed.run.screen.Terminal.is_terminal", True)
    monkeypatch.setitem(os.environ, "COLUMNS", "80")
    monkeypatch.setitem(os.environ, "TERM", "dumb")
    found = shown(capsys)
    assert max(map(len, found)) <= 80
    assert found[2].startswith("  ceiling 80.0 %")


def test_a_run_with_a_name_of_its_own_is_as_new_as_its_record(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(there, "\u00d6l und K\u00e4se")
    for day, place in (("2026-01-02T12:00", 1), ("2026-01-05T12:00", 0), ("2025-12-31T12:00", 3)):
        at_s = datetime.fromisoformat(day).timestamp()
        os.utime(run / "run.json", (at_s, at_s))
        assert [line.startswith(run.name) for line in shown(capsys)[1:]].index(True) == place


@pytest.mark.parametrize("words", [["runs"], ["runs", "--json"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_told(
    there: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    is_buffered: bool,
) -> None:
    raw = io.FileIO("/dev/full", "w")
    through: Any = io.BufferedWriter(raw) if is_buffered else raw
    with io.TextIOWrapper(through, write_through=not is_buffered) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert "Traceback" not in err


def test_a_reader_that_goes_away_has_had_enough(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["runs"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            monkeypatch.setattr("sys.stdout", stream)
            assert cli.main(words) == 0
    assert capsys.readouterr().err == ""
