"""``-m search=optuna`` and a plain ``-m`` as their user meets them, whatever becomes of the trials."""

import os
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, Done, run
from tests.end_to_end.many_processes import left_in, started, until
from tests.kit.tables import rows_of
from wellfed.process import MAY_FORK
from wellfed.study.rows import Row, read_rows
from wellfed.study.trial_end import TrialMetric

pytest.importorskip("optuna")
pytestmark = [pytest.mark.skipif(not MAY_FORK, reason="forks"), pytest.mark.slow]
PLANTED = ROOT / "tests" / "study" / "search" / "planted"
PATH = os.pathsep.join(filter(None, [str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH")]))
TOP = "workload.model.top"
FAULT = "workload.model.fault"
OPTUNA = ("search=optuna", f"{TOP}=interval(0.1,0.9)")


def measured(rows: list[Row]) -> list[tuple[object, ...]]:
    """What a trial leaves by itself; its study may have been stopped before it noted the end."""
    return [(row.point, row.kind, row.status, row.started_at, row.samples_per_s, row.value) for row in rows]


@dataclass(frozen=True)
class Searched:
    """A finished command and what it has left."""

    done: Done
    folder: Path

    @property
    def rows(self) -> list[Row]:
        return list(read_rows(self.folder, TrialMetric("score", "max")).rows)

    def row(self, override: str) -> Row:
        """The one that has it."""
        (found,) = [row for row in self.rows if override in row.overrides]
        return found

    @property
    def table(self) -> list[dict[str, str]]:
        return rows_of(self.folder / "leaderboard.csv")


def fixed(cwd: Path) -> list[str]:
    folder = cwd / "conf" / "workload"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planted.yaml").write_text((PLANTED / "planted.yaml").read_text())
    ours = ["workload=planted", "logger=none", "loader=baseline"]
    return ["--config-dir", str(cwd / "conf"), *ours, "telemetry=none"]


def search(cwd: Path, *more: str, name: str = "optuna", **variables: str) -> Searched:
    done = run("train.py", "-m", *fixed(cwd), *more, cwd=cwd, PYTHONPATH=PATH, **variables)
    return Searched(done, cwd / "logs" / "planted" / "searches" / name)


def searching(cwd: Path, *more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return started("train.py", ["-m", *fixed(cwd), *more], cwd=cwd, python_path=PATH)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    cwd = tmp_path_factory.mktemp("found")
    return search(cwd, *OPTUNA, "workload.optimizer.lr=0.1,0.01", "search.max_trials=14", "trainer.max_epochs=5")


def test_it_finds_what_learns_best_and_ranks_by_it(found: Searched) -> None:
    assert found.done.code == 0, found.done.text
    assert "Axes: workload.model.top: 0.1 to 0.9; workload.optimizer.lr: 0.1, 0.01" in found.done.out
    rows = found.rows
    assert [row.trial for row in rows] == list(range(14))
    assert len({row.point for row in rows}) == 14
    complete = [row for row in rows if row.outcome == "complete"]
    values = [row.value for row in sorted(complete, key=lambda row: -(row.value or 0))]
    assert [float(entry["value"]) for entry in found.table if entry["rank"]] == values
    assert [int(entry["rank"]) for entry in found.table if entry["rank"]] == list(range(1, len(values) + 1))
    assert float(found.table[0][TOP]) > 0.6
    assert f"val/score (most is best): {len(complete)} complete, {14 - len(complete)} pruned" in found.done.out


def test_after_kill_9_the_same_command_completes_the_table(tmp_path: Path) -> None:
    asked = (*OPTUNA, "search.max_trials=7", "trainer.max_epochs=4", "workload.model.pause_s=0.02")
    folder = tmp_path / "logs" / "planted" / "searches" / "optuna"

    def rows() -> list[Row]:
        return list(read_rows(folder, TrialMetric("score", "max")).rows) if folder.exists() else []

    with searching(tmp_path, *asked) as process:
        until(lambda: len(rows()) >= 2, process)
        until(lambda: len(list(folder.glob("*/metrics.csv"))) > len(rows()), process)
        process.kill()
        process.wait()
        until(lambda: not left_in(tmp_path))
    first = rows()
    assert 2 <= len(first) < 7
    again = search(tmp_path, *asked)
    assert again.done.code == 0, again.done.text
    assert measured(again.rows[: len(first)]) == measured(first)
    assert len(again.rows) == len({row.point for row in again.rows}) == len(again.table) == 7
    (aside,) = folder.glob("*.attempt1")
    point = aside.name.partition(".")[0]
    assert point in {row.point for row in again.rows[len(first) :]}
    assert again.rows[len(first)].point == point  # asked again before all others


def test_whatever_becomes_of_a_trial_is_a_row(tmp_path: Path) -> None:
    faults = {
        "none": ("ok", "complete", ""),
        "raise": ("failed", "failed", "planted: step went wrong"),
        "kill": ("killed", "failed", "ended by SIGKILL"),
        "not_finite": ("ok", "failed", "no finite figure of the metric"),
        "build": ("invalid", "failed", "no such layer: 1"),
    }
    searched = search(tmp_path, "search=grid", f"{FAULT}={','.join(faults)}", "trainer.max_epochs=4", name="grid")
    assert searched.done.code == 0, searched.done.text
    assert "Traceback" not in searched.done.err
    for fault, (status, outcome, _) in faults.items():
        row = searched.row(f"{FAULT}={fault}")
        assert (row.status, row.outcome) == (status, outcome)
    table = {entry[FAULT]: entry for entry in searched.table}
    assert [fault for fault, (_, _, words) in faults.items() if words not in table[fault]["why"]] == []
    killed = searched.row(f"{FAULT}=kill")
    again = search(tmp_path, "search=grid", f"{FAULT}={','.join(faults)}", "trainer.max_epochs=4", name="grid")
    assert "search.retry=[failed,killed]" in again.done.out
    retried = search(tmp_path, "search=grid", f"{FAULT}={','.join(faults)}", "trainer.max_epochs=4",
                     "search.retry=[killed]", name="grid")  # fmt: skip
    assert [row.point for row in retried.rows if row.attempt == 2] == [killed.point]
    assert len(retried.rows) == len(faults)


# -- what can't be searched ------------------------------------------------------------------------------------------
