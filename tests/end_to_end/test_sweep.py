"""``python src/train.py -m sweep=quick`` as its user meets it, whatever becomes of the trials and of the sweep."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, Done, record_of, run
from tests.end_to_end.many_processes import left_in, started, until
from wellfed.process import MAY_FORK
from wellfed.study.rows import Row, Rows, read_rows
from wellfed.study.study_files import SweepFile

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
PLANTED = ROOT / "tests" / "study" / "sweep" / "planted"
PATH = os.pathsep.join(filter(None, [str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH")]))
LR = "workload.optimizer.lr"
FAULT = "workload.model.fault"


def measured(rows: list[Row]) -> list[tuple[object, ...]]:
    """What a trial leaves by itself; its study may have been stopped before it noted the end."""
    return [(row.point, row.kind, row.status, row.started_at, row.samples_per_s, row.value) for row in rows]


@dataclass(frozen=True)
class Swept:
    """A finished command and what it has left."""

    done: Done
    folder: Path

    @property
    def rows(self) -> list[Row]:
        return list(read_rows(self.folder).rows)

    def row(self, *overrides: str) -> Row:
        """The last trial of the one point that has these."""
        (found,) = [row for row in read_rows(self.folder).latest.values() if {*overrides} <= {*row.overrides}]
        return found


def arguments(cwd: Path, *more: str) -> list[str]:
    folder = cwd / "conf" / "workload"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planted.yaml").write_text((PLANTED / "planted.yaml").read_text())
    fixed = ["workload=planted", "logger=none", "loader=baseline"]
    short = ["telemetry.ceiling_steps=3", "sweep.trial_steps=20"]
    return ["-m", "--config-dir", str(cwd / "conf"), "sweep=quick", *fixed, *short, *more]


def folder_of(cwd: Path) -> Path:
    return cwd / "logs" / "planted" / "sweeps" / "quick"


def sweep(cwd: Path, *more: str) -> Swept:
    return Swept(run("train.py", *arguments(cwd, *more), cwd=cwd, PYTHONPATH=PATH), folder_of(cwd))


def sweeping(cwd: Path, *more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return started("train.py", arguments(cwd, *more), cwd=cwd, python_path=PATH)


# Fault: status, exit code of its process, kind of error, words of its message, words of its last lines of stderr.
ENDS = {
    "none": ("ok", 0, None, "", ""),
    "raise": ("failed", 1, "code", "planted: step went wrong", "planted: step went wrong"),
    "kill": ("killed", -9, "host_oom", "ended by SIGKILL", ""),
    "term": ("interrupted", 143, None, "", ""),
    "segv": ("failed", -11, "code", "crashed: SIGSEGV", ""),
    "exit": ("failed", 1, "code", "SystemExit: 7", "SystemExit: 7"),
    "leave": ("failed", 0, "code", "", ""),
    "oom": ("oom", 3, "device_oom", "Out of memory with micro-batches of 16:", "Out of memory"),
    "hang": ("timeout", -9, "code", "had not ended after 10 s", ""),
    "build": ("invalid", None, "config", "no such layer: 7", ""),
    "build_crash": ("failed", None, "data", "the process that holds data and model has died", ""),
    "build_exit": ("failed", None, "data", "SystemExit: 4", ""),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A trial of each kind."""
    cwd = tmp_path_factory.mktemp("failures")
    return sweep(cwd, f"{FAULT}={','.join(ENDS)}", "sweep.timeout_s=10")


@pytest.mark.slow
def test_one_trial_that_is_ok_makes_the_sweep_ok_and_nothing_is_left_running(failures: Swept) -> None:
    assert failures.done.code == 0, failures.done.text
    assert "Traceback" not in failures.done.text
    assert left_in(failures.folder.parents[3]) == []


@pytest.mark.slow
def test_each_trial_that_went_wrong_is_a_row(failures: Swept) -> None:
    assert Counter(row.kind for row in failures.rows) == {"trial": len(ENDS)}
    for fault, (status, exit_code, kind, words, stderr) in ENDS.items():
        row = failures.row(f"{FAULT}={fault}")
        assert (row.status, row.exit_code) == (status, exit_code), row
        assert (row.error or {}).get("kind") == kind, row
        assert words in (row.error or {}).get("message", ""), row
        assert stderr in "".join(row.stderr), row
        assert row.attempt == 1
        assert len(row.code) >= 10
        lines = [
            line for line in failures.done.out.splitlines() if line.endswith(f"{FAULT}={fault}") or f"{fault}: " in line
        ]
        assert any(line.startswith(status) for line in lines), failures.done.out


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Good ones, ones out of memory, and a value that no run can have."""
    cwd = tmp_path_factory.mktemp("mixed")
    return sweep(cwd, f"{FAULT}=none,oom", f"{LR}=0.1,0.2", "loader.num_workers=0,-1")


def test_a_bad_value_on_one_axis_is_a_row_and_the_rest_runs(mixed: Swept) -> None:
    assert mixed.done.code == 0, mixed.done.text
    trials = [row for row in mixed.rows if row.kind == "trial"]
    assert Counter(row.status for row in trials) == {"ok": 2, "oom": 2, "invalid": 4}
    for row in trials:
        assert (row.status == "invalid") == ("loader.num_workers=-1" in row.overrides)
        assert row.status != "invalid" or "loader.num_workers: is -1" in str(row.error) or "-1" in str(row.error)


def test_the_best_are_measured_again_in_turn(mixed: Swept) -> None:
    confirmed = [row for row in mixed.rows if row.kind == "confirm"]
    best = {row.point for row in mixed.rows if row.status == "ok" and row.kind == "trial"}
    assert Counter(row.point for row in confirmed) == dict.fromkeys(best, 3)
    order = [row.point for row in confirmed]
    assert order == [*order[:2], *order[1::-1], *order[:2]]
    assert [row.attempt for row in confirmed] == [1, 1, 2, 2, 3, 3]
    assert len({row.folder for row in confirmed}) == 6


@pytest.mark.slow
def test_the_same_command_again_runs_nothing(tmp_path: Path) -> None:
    same = [f"{FAULT}=none,oom", f"{LR}=0.1,0.2", "loader.num_workers=0,-1"]
    first = sweep(tmp_path, *same).rows
    again = sweep(tmp_path, *same)
    assert again.done.code == 0
    assert again.rows == first
    assert "Going on in " in again.done.out
    assert "8 of 8 points have a row" in again.done.out
    assert "Trials:" not in again.done.out
    retried = sweep(tmp_path, *same, "sweep.retry=[oom,failed]").rows
    assert retried[:-2] == [row for row in first if row.status != "oom"]
    assert [(row.status, row.attempt) for row in retried[-2:]] == [("oom", 2), ("oom", 2)]


def hanging(cwd: Path) -> bool:
    """One trial has ended, and the next does its steps."""
    rows = read_rows(folder_of(cwd)).rows
    return len(rows) == 1 and len(list(folder_of(cwd).glob("*/run.json"))) == 2


@pytest.mark.slow
def test_ctrl_c_ends_all_and_the_same_command_goes_on(tmp_path: Path) -> None:
    axes = [f"{FAULT}=none,hang"]
    with sweeping(tmp_path, *axes) as process:
        until(lambda: hanging(tmp_path), process)
        second = run("train.py", *arguments(tmp_path, *axes), cwd=tmp_path, PYTHONPATH=PATH)
        assert second.code == 2
        told = f"another process is writing to it (process {process.pid} on "
        assert f"{folder_of(tmp_path).relative_to(tmp_path)}: {told}" in second.err
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert "The same command again runs what is missing." in out
    assert left_in(tmp_path) == []
    (row,) = read_rows(folder_of(tmp_path)).rows
    assert row.status == "ok"
    path = folder_of(tmp_path) / row.folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "trial": None}))  # as if killed just after the trial
    again = sweep(tmp_path, *axes, "sweep.timeout_s=5")
    assert again.done.code == 0
    assert [(row.status, row.attempt) for row in again.rows] == [("ok", 1), ("timeout", 2)]
    assert again.rows[0].samples_per_s == row.samples_per_s
    assert len(list(again.folder.glob("*.attempt1"))) == 1  # the one that was stopped


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_until_all_is_there(tmp_path: Path) -> None:
    rates = ",".join(f"0.{number}" for number in range(1, 9))
    axes = [f"{FAULT}=slow", f"{LR}={rates}"]
    draw, rows, kills = random.Random(7), [], 0
    for _ in range(12):
        with sweeping(tmp_path, *axes) as process:
            if draw.random() < 0.7:  # in the trials, whenever those begin
                started = len(list(folder_of(tmp_path).glob("*/stdout.txt")))
                until(
                    lambda: process.poll() is not None or len(list(folder_of(tmp_path).glob("*/stdout.txt"))) > started  # noqa: B023
                )
                time.sleep(draw.uniform(0, 3))
            else:
                time.sleep(draw.uniform(0, 10))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            kills += 1
            until(lambda: left_in(tmp_path) == [])
        found = read_rows(folder_of(tmp_path)) if folder_of(tmp_path).exists() else Rows()
        assert measured(found.rows[: len(rows)]) == measured(rows)  # nothing is lost
        rows = list(found.rows)
    swept = sweep(tmp_path, *axes)
    assert swept.done.code == 0
    trials = Counter(row.point for row in swept.rows if row.kind == "trial")
    assert trials == dict.fromkeys(SweepFile.read(swept.folder).ids, 1)
    assert len(trials) == 8
    assert all(row.status == "ok" for row in swept.rows)
    lost = list(swept.folder.glob("*.attempt*"))
    assert kills >= 3
    assert len(lost) <= kills  # at most the one that was running
    assert left_in(tmp_path) == []


RAY = ("hydra/launcher=ray", "hydra.launcher.ray.init.address=local", "+hydra.launcher.ray.init.num_cpus=2")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("hydra/launcher=basic",), RAY], ids=["basic", "ray"])
def test_hydras_launchers_run_the_same_trials(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    if launcher == RAY:
        pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")
    axes = [f"{FAULT}=none,raise,build", f"{LR}=0.1,0.2", *launcher]
    swept = sweep(tmp_path, *axes)
    assert swept.done.code == 0, swept.done.text
    statuses = Counter(row.status for row in swept.rows)
    assert statuses == {"ok": 2 + 6, "failed": 2, "invalid": 2}, swept.done.text  # the best again, too
    for row in swept.rows:
        if row.status != "invalid":
            record = record_of(swept.folder / row.folder)
            assert record["status"] == row.status
            assert record["steps"] > row.steps  # the first ones are no measurement
    assert "planted: step went wrong" in swept.row(f"{FAULT}=raise", f"{LR}=0.1").error["message"]
    assert sweep(tmp_path, *axes).rows == swept.rows
    until(lambda: left_in(tmp_path) == [])
