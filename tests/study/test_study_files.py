import itertools
import os
from pathlib import Path

import pytest

from tests.kit import made
from wellfed.config.files.folder_lookup import find
from wellfed.errors import ConfigError
from wellfed.study import ledger
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


def test_a_folder_is_meant_wherever_it_is(tmp_path: Path):
    folder = sweep_of(tmp_path / "elsewhere", "recsys", "quick")
    assert find(str(folder), tmp_path / "logs", SWEEP) == folder
    assert find(f"{folder}/", tmp_path / "logs", SWEEP) == folder


def test_a_name_is_looked_up_in_all_workloads(tmp_path: Path):
    sweep_of(tmp_path, "recsys", "quick")
    full = sweep_of(tmp_path, "cats", "full")
    assert find("full", tmp_path, SWEEP) == full


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep_of(tmp_path / "logs", "recsys", "quick")
    here = tmp_path / "quick"
    here.mkdir()
    made.sweep_file().write(here)
    monkeypatch.chdir(tmp_path)
    assert find("quick", Path("logs"), SWEEP).resolve() == here


@pytest.mark.parametrize("asked", [None, "last", "f", "ful"])
def test_the_newest_and_a_beginning_are_shown(tmp_path: Path, asked: str | None, capsys: pytest.CaptureFixture[str]):
    sweep_of(tmp_path, "recsys", "quick")
    full = sweep_of(tmp_path, "cats", "full")
    assert find(asked, tmp_path, SWEEP) == full
    what = "the newest sweep" if asked in (None, "last") else f"{asked}..."
    assert capsys.readouterr().err == f"Taking {what}: {full}\n"


def test_a_whole_name_goes_before_a_beginning_and_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full, last = sweep_of(tmp_path, "cats", "full"), sweep_of(tmp_path, "cats", "last")
    sweep_of(tmp_path, "cats", "full_2")
    assert (find("full", tmp_path, SWEEP), find("last", tmp_path, SWEEP)) == (full, last)
    assert capsys.readouterr().err == ""


def test_a_beginning_of_two_names_lists_both(tmp_path: Path):
    first, second = sweep_of(tmp_path, "cats", "quick_1"), sweep_of(tmp_path, "recsys", "quick_2")
    text = refusal("qui", tmp_path)
    assert f"qui: begins 2 names. Write more of one: {second}, {first}." in text


def test_an_unknown_name_lists_what_there_is(tmp_path: Path):
    known = [sweep_of(tmp_path, "cats", "full"), sweep_of(tmp_path, "recsys", "quick")]
    text = refusal("quik", tmp_path)
    assert "is neither a folder nor the name of a sweep" in text
    assert f"Did you mean quick? There are: {known[1]}, {known[0]}." in text
    assert "Did you mean" not in refusal("zzz", tmp_path)


def test_where_no_sweep_is_yet_the_way_to_one_is_told(tmp_path: Path):
    text = refusal("quick", tmp_path / "logs")
    assert f"There is no sweep in {tmp_path / 'logs'} yet: python src/train.py -m sweep=quick makes one." in text
    assert "--log-dir" in text


def test_a_folder_that_is_no_sweeps_is_told_so(tmp_path: Path):
    assert f"{tmp_path}: is a folder without sweep.json, so no sweep's." in refusal(str(tmp_path), tmp_path)


def test_what_is_loaded_is_what_was_written(tmp_path: Path):
    sweep = made.sweep_file()
    rows = made.rows(sweep)
    file, found = load(made.write(tmp_path, sweep, rows))
    assert file == sweep
    assert found == ledger.Read(tuple(rows))


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "[]", "null", '{"schema": 2}', '{"schema": 1}'],
)
def test_a_damaged_sweep_file_is_told(tmp_path: Path, text: str):
    made.write(tmp_path)
    (tmp_path / SWEEP.marker).write_text(text)
    with pytest.raises(ConfigError, match=r"can't be read: .*sweep\.json is not the file of a sweep") as raised:
        load(tmp_path)
    assert "Start the sweep again with the same command" in str(raised.value)
