"""``-m search=optuna`` and a plain ``-m`` as their user meets them, whatever becomes of the trials."""

import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import ROOT, Done, record_of, run
from tests.end_to_end.many_processes import left_in, started, until
from tests.fake_cuda.machine import FakeCuda
from tests.kit.tables import rows_of
from wellfed.process import MAY_FORK
from wellfed.study import ledger
from wellfed.study.row import Row

pytest.importorskip("optuna")
pytestmark = [pytest.mark.skipif(not MAY_FORK, reason="forks"), pytest.mark.slow]
PLANTED = ROOT / "tests" / "study" / "search" / "planted"
PATH = os.pathsep.join(filter(None, [str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH")]))
TOP = "workload.model.top"
FAULT = "workload.model.fault"
OPTUNA = ("search=optuna", f"{TOP}=interval(0.1,0.9)")


@dataclass(frozen=True)
class Searched:
    """A finished command and what it has left."""

    done: Done
    folder: Path

    @property
    def rows(self) -> list[Row]:
        return list(ledger.read(self.folder).rows)

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


# -- what it finds ---------------------------------------------------------------------------------------------------


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


def test_the_pages_show_ranks_and_curves(found: Searched) -> None:
    page = (found.folder / "leaderboard.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1  # of the axis; curves are a live chart
    assert "14 learning curves over optimizer steps" in page
    assert f'href="{found.table[0]["folder"]}/report.html"' in page
    shown = run("../src/wellfed/__main__.py", "leaderboard", "optuna", "--json", cwd=found.folder.parents[3])
    assert shown.code == 0, shown.text
    assert json.loads(shown.out)["counts"]["complete"] == len([entry for entry in found.table if entry["rank"]])


def test_more_trials_go_on_and_another_search_is_refused(found: Searched) -> None:
    cwd = found.folder.parents[3]
    both = (*OPTUNA, "workload.optimizer.lr=0.1,0.01", "trainer.max_epochs=5")
    before = {path: path.read_bytes() for path in found.folder.glob("*.*")}
    other = search(
        cwd, "search=optuna", f"{TOP}=interval(0.1,0.8)", "workload.optimizer.lr=0.1,0.01", "trainer.max_epochs=5"
    )
    assert other.done.code == 2
    assert f"{TOP}: 0.1 to 0.9" in other.done.err
    assert f"{TOP}: 0.1 to 0.8" in other.done.err
    assert "search.name=optuna_2" in other.done.err
    longer = search(cwd, *OPTUNA, "workload.optimizer.lr=0.1,0.01", "trainer.max_epochs=6")
    assert (longer.done.code, "trainer.max_epochs=5" in longer.done.err) == (2, True)
    grid = search(cwd, "search=grid", "search.name=optuna", f"{TOP}=0.1,0.8")
    assert (grid.done.code, "search.sampler=tpe" in grid.done.err) == (2, True)
    loss = search(cwd, *both, "trainer.best_metric=loss", "trainer.best_mode=min")
    assert (loss.done.code, "metric val/score (max)" in loss.done.err) == (2, True)
    assert {path: path.read_bytes() for path in found.folder.glob("*.*") if path.suffix != ".log"} == {
        path: content for path, content in before.items() if path.suffix != ".log"
    }
    more = search(cwd, *both, "search.max_trials=15")
    assert more.done.code == 0, more.done.text
    assert [row.trial for row in more.rows] == list(range(15))


# -- what stops it ---------------------------------------------------------------------------------------------------


def test_after_kill_9_the_same_command_completes_the_table(tmp_path: Path) -> None:
    asked = (*OPTUNA, "search.max_trials=7", "trainer.max_epochs=4", "workload.model.pause_s=0.02")
    folder = tmp_path / "logs" / "planted" / "searches" / "optuna"

    def rows() -> list[Row]:
        return list(ledger.read(folder).rows) if folder.exists() else []

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
    assert again.rows[: len(first)] == first
    assert len(again.rows) == len({row.point for row in again.rows}) == len(again.table) == 7
    (aside,) = folder.glob("*.attempt1")
    point = aside.name.partition(".")[0]
    assert point in {row.point for row in again.rows[len(first) :]}
    assert again.rows[len(first)].point == point  # asked again before all others


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_there_and_says_how_to_go_on(tmp_path: Path, signum: int, code: int) -> None:
    with searching(tmp_path, f"{TOP}=0.1,0.2,0.3", "workload.model.pause_s=0.05", "trainer.max_epochs=2") as process:
        until(lambda: list(tmp_path.glob("logs/planted/searches/*/ledger.jsonl")), process)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        until(lambda: not left_in(tmp_path))
    (folder,) = (tmp_path / "logs" / "planted" / "searches").iterdir()
    assert f"The same command with search.name={folder.name} goes on" in out
    assert "1 complete, 2 pending" in out
    again = search(tmp_path, f"{TOP}=0.1,0.2,0.3", "workload.model.pause_s=0.05", "trainer.max_epochs=2",
                   f"search.name={folder.name}", name=folder.name)  # fmt: skip
    assert again.done.code == 0, again.done.text
    assert "3 complete" in again.done.out


# -- grids of whole trainings ----------------------------------------------------------------------------------------


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
    counted = Counter(row.point for row in retried.rows)
    assert [row.point for row in retried.rows if counted[row.point] == 2] == [killed.point] * 2


# -- what can't be searched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [OPTUNA, ("search=grid", f"{TOP}=0.1,0.2")], ids=["optuna", "grid"])
def test_a_metric_that_nobody_reports_is_told_and_nothing_is_left(tmp_path: Path, sampler: tuple[str, ...]) -> None:
    asked = ("trainer.best_metric=nope", "trainer.best_mode=max", "search.name=optuna")
    searched = search(tmp_path, *sampler, *asked)
    assert searched.done.code == 2, searched.done.text
    assert "trainer.best_metric=nope: validation gives no such metric" in searched.done.err
    assert "score" in searched.done.err
    assert not searched.folder.exists()


def test_two_cards_run_two_trials_at_a_time(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    cards = fake_cuda.environment(cards=2, mib=8192)
    cards["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "kit"), cards["PYTHONPATH"]])
    slow = ("trainer.max_epochs=4", "workload.model.pause_s=0.1", "search.max_trials=6")
    done = run("train.py", "-m", *fixed(tmp_path), *OPTUNA, *slow, cwd=tmp_path, **cards)
    assert done.code == 0, done.text
    folder = tmp_path / "logs" / "planted" / "searches" / "optuna"
    rows = list(ledger.read(folder).rows)
    assert sorted(row.trial for row in rows) == list(range(6))
    assert [row.status for row in rows] == ["ok"] * 6
    assert most_at_a_time(rows, folder) == 2
    on_cpu = ("gpu=cpu", "trainer.max_epochs=2", "workload.model.pause_s=0.1", f"{TOP}=0.3,0.5,0.7", "search=grid")
    done = run("train.py", "-m", *fixed(tmp_path), *on_cpu, cwd=tmp_path, **cards)
    assert done.code == 0, done.text
    folder = folder.with_name("grid")
    assert most_at_a_time(list(ledger.read(folder).rows), folder) == 1


def most_at_a_time(rows: list[Row], folder: Path) -> int:
    """By when each began and ended."""
    spans: list[tuple[float, float]] = []
    for row in rows:
        record: Any = record_of(folder / row.folder)
        end_s = (folder / row.folder / "run.json").stat().st_mtime
        spans.append((end_s - record["duration_s"], end_s))
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
