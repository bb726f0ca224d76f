import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit import made
from tests.kit.wandb_files import stored
from wellfed.config.schema import LoggerConfig, LoggerMode
from wellfed.study.board import files as leaderboard_files
from wellfed.study.board.publish import publish
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


@pytest.mark.slow
def test_the_leaderboard_is_a_table_in_the_group_of_the_sweep(folder: Path):
    publish(folder, SWEEP, LoggerConfig(mode=LoggerMode.auto))
    (table,) = sorted(folder.glob("wandb/offline-run-*"))
    run = stored(table)
    (facts,) = run.of_type("run")[:1]
    assert (facts["display_name"], facts["run_group"], facts["project"]) == (
        "quick leaderboard", "recsys/quick", "wellfed",
    )  # fmt: skip
    (media,) = table.glob("files/media/table/*.json")
    found = json.loads(media.read_text())
    assert "leaderboard" in str(run.history[-1])
    assert len(found["data"]) == 4
    assert found["columns"][:3] == ["rank", "point", "status"]
    assert found["data"][0][1] == FAST.id
