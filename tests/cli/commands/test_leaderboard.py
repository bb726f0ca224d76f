import json
from pathlib import Path

import pytest

from tests.kit import made
from wellfed.cli import main as cli
from wellfed.study.board import files as leaderboard_files
from wellfed.study.rows import Row

FILES = ("leaderboard.csv", "leaderboard.html")


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs"


@pytest.fixture
def folder(log_dir: Path) -> Path:
    return made.write(log_dir / "recsys" / "sweeps" / "quick")


def test_the_ranks_are_shown_and_the_files_written(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["leaderboard", "quick"]) == 0
    out = capsys.readouterr().out
    assert (
        "Sweep quick of recsys: 17 ok, 1 oom, 1 infeasible, 1 invalid, 1 timeout, 1 failed, 1 killed, 1 pending" in out
    )
    assert "triplets/s" in out
    assert "1=" in out
    assert "oom: loader=aggressive memory=dynamic gpu.precision=bf16-mixed: CUDA ran out of memory" in out
    assert f"Keep the fastest: python -m wellfed choose {Path('logs/recsys/sweeps/quick')} --name mine" in out
    assert all(str(Path("logs/recsys/sweeps/quick") / name) in out for name in FILES)
    assert all((folder / name).is_file() for name in FILES)


def test_all_figures_as_json_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["leaderboard", "quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["entries"]) == 24
    assert found["counts"]["ok"] == 17
    assert found["entries"][0]["rank"] == 1
    assert all((folder / name).is_file() for name in FILES)


def test_more_than_20_ranks_are_in_the_files(log_dir: Path, capsys: pytest.CaptureFixture[str]):
    sweep = made.sweep_file({"loader.num_workers": tuple(map(str, range(1, 26)))}, name="many")
    rows = [made.row(point, 100.0 * number) for number, point in enumerate(sweep.points, start=1)]
    folder = made.write(log_dir / "recsys" / "sweeps" / "many", sweep, rows)
    assert cli.main(["leaderboard", "many"]) == 0
    assert "... and 5 more in the files" in capsys.readouterr().out
    assert len((folder / "leaderboard.csv").read_text().splitlines()) == 26


@pytest.mark.parametrize("rows", [[], "failed"])
def test_without_a_rate_there_is_nothing_to_keep(
    log_dir: Path, capsys: pytest.CaptureFixture[str], rows: list[Row] | str
):
    sweep = made.sweep_file()
    found = [made.failed_row(point, "failed") for point in sweep.points] if rows else []
    made.write(log_dir / "recsys" / "sweeps" / "quick", sweep, found)
    assert cli.main(["leaderboard", "quick"]) == 0
    out = capsys.readouterr().out
    assert ("24 failed" if rows else "24 pending") in out
    assert "Keep the fastest" not in out
    assert "Files: " in out


def test_an_ambiguous_name_is_told_with_both_folders(folder: Path, log_dir: Path, capsys: pytest.CaptureFixture[str]):
    made.write(log_dir / "cats" / "sweeps" / "quick")
    assert cli.main(["leaderboard", "quick"]) == 2
    assert "may be any of 2 folders. Write one: logs/" in capsys.readouterr().err
    assert not any((folder / name).exists() for name in FILES)


def test_names_are_looked_up_where_logs_are(tmp_path: Path, log_dir: Path, capsys: pytest.CaptureFixture[str]):
    made.write(tmp_path / "other" / "recsys" / "sweeps" / "far")
    assert cli.main(["leaderboard", "far"]) == 2
    assert "there is no sweep or search in logs yet" in capsys.readouterr().err
    assert cli.main(["leaderboard", "far", "--log-dir", "other"]) == 0


def test_a_folder_that_can_not_be_written_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leaderboard_files, "write_atomically", full)
    assert cli.main(["leaderboard", "quick"]) == 2
    err = capsys.readouterr().err
    assert "can't be written to: No space left on device. Free space, or make the folder writable." in err


def test_no_value_reaches_the_terminal_as_a_control_character(log_dir: Path, capsys: pytest.CaptureFixture[str]):
    evil = "\x1b[31m\x9b\x07"
    sweep = made.sweep_file({f"a{evil}": (f"1{evil}", "2"), "b": ("1", f"2{evil}")}, workload=f"w{evil}", name="evil")
    first, *rest, last = sweep.points
    error = {"kind": "code", "message": f"said {evil}", "advice": evil}
    rows = [made.row(first, 200.0), *map(made.row, rest), made.failed_row(last, "failed", error=error)]
    folder = made.write(log_dir / "recsys" / "sweeps" / "evil", sweep, rows)
    for words in ([], ["--json"]):
        assert cli.main(["leaderboard", str(folder), *words]) == 0
        out = capsys.readouterr().out
        assert not set(out) & set(evil[:1] + evil[5:])
        assert "said " in out
    for name in FILES[1:]:
        assert not set((folder / name).read_text()) & {"\x1b", "\x9b", "\x07"}
