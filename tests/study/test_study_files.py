"""Which folder a name means, and what it holds."""

import itertools
import os
from pathlib import Path

import pytest

from tests.kit import made
from wellfed.errors import ConfigError
from wellfed.record.folder_lookup import find
from wellfed.study.study_files import SWEEP, load

SECONDS = itertools.count(1_000_000_000)


def sweep_of(log_dir: Path, workload: str, name: str) -> Path:
    folder = log_dir / workload / "sweeps" / name
    folder.mkdir(parents=True)
    made.sweep_file(name=name, workload=workload).write(folder)
    number = next(SECONDS)
    os.utime(folder / SWEEP.marker, (number, number))
    return folder


def refusal(asked: str, log_dir: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        find(asked, log_dir, SWEEP)
    return str(raised.value)


def test_a_folder_goes_before_a_name_and_a_name_is_looked_up_in_all_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_of(tmp_path / "logs", "recsys", "quick")
    full = sweep_of(tmp_path / "logs", "cats", "full")
    here = tmp_path / "quick"
    here.mkdir()
    made.sweep_file().write(here)
    monkeypatch.chdir(tmp_path)
    assert find("quick", Path("logs"), SWEEP).resolve() == here
    assert find(str(full), tmp_path / "elsewhere", SWEEP) == find("full", tmp_path / "logs", SWEEP) == full


@pytest.mark.parametrize("asked", [None, "last", "ful"])
def test_the_newest_and_a_beginning_are_shown(
    tmp_path: Path, asked: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_of(tmp_path, "recsys", "quick")
    full = sweep_of(tmp_path, "cats", "full")
    assert find(asked, tmp_path, SWEEP) == full
    what = "the newest sweep" if asked in (None, "last") else f"{asked}..."
    assert capsys.readouterr().err == f"Taking {what}: {full}\n"


def test_what_is_no_name_lists_what_there_is(tmp_path: Path) -> None:
    known = [sweep_of(tmp_path, "cats", "full"), sweep_of(tmp_path, "recsys", "quick_1")]
    assert f"There are: {known[1]}, {known[0]}." in refusal("quik_1", tmp_path)
    other = sweep_of(tmp_path, "recsys", "quick_2")
    assert f"qui: may be any of 2 folders. Write one: {other}, {known[1]}." in refusal("qui", tmp_path)
    assert "python src/train.py -m sweep=quick makes one." in refusal("quick", tmp_path / "logs")
    assert f"{tmp_path}: is neither the folder nor the name of a sweep" in refusal(str(tmp_path), tmp_path)


def test_what_is_loaded_is_what_was_written(tmp_path: Path) -> None:
    sweep = made.sweep_file(objective="peak_memory")
    rows = made.rows(sweep)
    file, found = load(made.write(tmp_path, sweep, rows))
    assert file == sweep
    ends = [(row.point, row.kind, row.status, row.samples_per_s, row.error, row.folder) for row in rows]
    assert [(r.point, r.kind, r.status, r.samples_per_s, r.error, r.folder) for r in found.rows] == ends


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema": 2}'])
def test_a_damaged_sweep_file_is_told(tmp_path: Path, text: str) -> None:
    made.write(tmp_path)
    (tmp_path / SWEEP.marker).write_text(text)
    with pytest.raises(ConfigError, match=r"can't be read: .*sweep\.json is not the file of a sweep") as raised:
        load(tmp_path)
    assert "Start it again with another sweep.name" in str(raised.value)
