import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit import made
from tests.kit.wandb_files import Stored, stored
from wellfed.config.schema import LoggerConfig, LoggerMode
from wellfed.observe.telemetry.metrics import TIME_AXIS
from wellfed.observe.telemetry.series import HOST
from wellfed.study.board import files as leaderboard_files
from wellfed.study.board.publish import publish, unpublished
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.rows import Row, Rows

SWEEP = made.sweep_file({"loader": ("baseline", "conservative", "balanced", "aggressive")})
SLOW, FAILED, FAST, REFUSED = SWEEP.points
ROWS = [
    made.row(SLOW, 100.0, peak_memory_gib=3.0),
    made.failed_row(FAILED, "oom"),
    made.row(FAST, 200.0),
    made.failed_row(REFUSED, "invalid"),
]


@pytest.fixture(autouse=True)
def bare(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the login, so that nothing is sent."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "sweep")


def written(folder: Path, rows: Sequence[Row] = ROWS) -> Path:
    made.write(folder, SWEEP, rows)
    leaderboard_files.write(folder, leaderboard(SWEEP, Rows(tuple(rows))))
    return folder


def put(folder: Path, rows: Sequence[Row] = ROWS, **logger: str) -> None:
    publish(folder, SWEEP, unpublished(folder, rows), LoggerConfig(**{"mode": LoggerMode.auto, **logger}))


def runs_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"))


def about(run: Stored) -> dict[str, object]:
    (found,) = run.of_type("run")[:1]
    return found


def summary_of(run: Stored) -> dict[str, object]:
    found: dict[str, object] = {}
    for entry in run.of_type("summary"):
        found |= entry["update"]
    return found


@pytest.mark.slow
def test_each_trial_is_a_run_and_the_leaderboard_a_table_all_in_one_group(folder: Path):
    put(folder)
    trials = {row.point: runs_in(folder / row.folder) for row in ROWS if row.folder}
    assert [len(found) for found in trials.values()] == [1, 1, 1]
    (table,) = runs_in(folder)
    everything = {point: stored(found[0]) for point, found in trials.items()} | {"quick leaderboard": stored(table)}
    for name, run in everything.items():
        facts = about(run)
        assert (facts["display_name"], facts["run_group"], facts["project"]) == (name, "recsys/quick", "wellfed")
    assert everything[FAST.id].exit_code == 0
    row = everything["quick leaderboard"].history[-1]
    (media,) = table.glob("files/media/table/*.json")
    found = json.loads(media.read_text())
    assert "leaderboard" in str(row)
    assert len(found["data"]) == 4
    assert found["columns"][:3] == ["rank", "point", "status"]
    assert found["data"][0][1] == FAST.id


@pytest.mark.slow
def test_the_figures_of_a_trial_are_its_summary_and_telemetry(folder: Path):
    lines = ["time_s,step,phase,gpu,util_pct,mem_gib"]
    lines += ["0.5,1,train,0,90,", "0.5,1,train,1,80,2.5", f"0.5,1,train,{HOST},,4", "1.0,2,train,0,95,"]
    (folder / SLOW.id / "telemetry.csv").write_text("\n".join(lines) + "\n")
    put(folder, ROWS[:1])
    (path,) = runs_in(folder / SLOW.id)
    run = stored(path)
    rows = run.history
    assert len(rows) == 2
    assert (rows[0]["gpu0/util_pct"], rows[0]["gpu1/util_pct"], rows[0]["gpu1/mem_gib"]) == (90, 80, 2.5)
    assert rows[1] == {TIME_AXIS: 1, "gpu0/util_pct": 95}
    found = summary_of(run)
    assert (found["status"], found["throughput/samples_per_s"], found["memory/peak_gib"]) == ("ok", 100.0, 3.0)
    assert "gpu/util_pct" not in found


def test_a_trial_that_is_in_wandb_or_has_no_record_is_not_copied(folder: Path):
    assert [row.point for row, _ in unpublished(folder, ROWS)] == [SLOW.id, FAILED.id, FAST.id]
    path = folder / SLOW.id / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wandb": {"id": "x"}}))
    (folder / FAILED.id / "run.json").unlink()
    assert [row.point for row, _ in unpublished(folder, ROWS)] == [FAST.id]
