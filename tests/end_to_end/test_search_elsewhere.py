"""Grids of whole trainings in a real Ray cluster on this machine, and in jobs of submitit's local executor."""

import os
import signal
import socket
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from tests.end_to_end.commands import record_of, run
from tests.end_to_end.many_processes import left_in, until
from tests.end_to_end.test_search import FAULT, PATH, TOP, Searched, fixed, search, searching
from tests.end_to_end.test_sweep_elsewhere import OF_ITS_OWN, node_processes, ray_launcher, submitit_launcher
from wellfed.process import MAY_FORK
from wellfed.study import ledger
from wellfed.study.learning_curve import read_curve

__all__ = ["ray_launcher", "submitit_launcher"]
pytestmark = [pytest.mark.skipif(not MAY_FORK, reason="forks"), pytest.mark.slow]


def patiently(cwd: Path, *more: str) -> Searched:
    """As `search`, of a grid: a job that imports torch for each trial takes its time where other tests run."""
    asked = ("-m", *fixed(cwd), "search=grid", *more)
    return Searched(
        run("train.py", *asked, cwd=cwd, PYTHONPATH=PATH, timeout_s=1200),
        cwd / "logs" / "planted" / "searches" / "grid",
    )


def same_ends(cwd: Path, launcher: str) -> Searched:
    """Trainings end as they do here, each with its curve, and the same command again runs none."""
    ends = {"none": ("ok", "complete"), "kill": ("killed", "failed"), "build": ("invalid", "failed")}
    its_own = OF_ITS_OWN if launcher == "ray" else []
    asked = (f"{FAULT}={','.join(ends)}", "trainer.max_epochs=3", f"hydra/launcher={launcher}", *its_own)
    searched = patiently(cwd, *asked)
    assert searched.done.code == 0, searched.done.text
    assert "Traceback" not in searched.done.text
    assert len(searched.rows) == 3
    for fault, (status, outcome) in ends.items():
        row = searched.row(f"{FAULT}={fault}")
        assert (row.status, row.outcome, row.host) == (status, outcome, socket.gethostname())
        if row.folder:
            assert record_of(searched.folder / row.folder)["status"] == status
    best = searched.row(f"{FAULT}=none")
    curve = read_curve(searched.folder / best.folder, "score")
    assert (len(curve), best.value, best.validations) == (3, curve[-1].value, 3)
    assert best.machine
    assert "search.retry=[killed]" in patiently(cwd, *asked).done.out
    assert left_in(cwd) == []
    return searched


def test_whole_trainings_end_the_same_in_jobs_of_submitit(tmp_path: Path, submitit_launcher: None) -> None:
    searched = same_ends(tmp_path, "submitit_local")
    assert list((searched.folder / ".submitit").rglob("*.pkl")) == []


def test_whole_trainings_end_the_same_in_a_cluster_that_ray_starts_itself(tmp_path: Path, ray_launcher: None) -> None:
    same_ends(tmp_path, "ray")


def test_ctrl_c_ends_the_job_that_runs_and_the_rows_are_kept(tmp_path: Path, submitit_launcher: None) -> None:
    asked = ("search=grid", f"{TOP}=0.3,0.7", "hydra/launcher=submitit_local", "workload.model.pause_s=0.05")
    folder = tmp_path / "logs" / "planted" / "searches" / "grid"
    with searching(tmp_path, *asked, "trainer.max_epochs=3") as process:
        until(lambda: folder.exists() and ledger.read(folder).rows, process)
        until(lambda: node_processes(tmp_path), process)  # the second
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, out + err
        assert "Traceback" not in out + err
        assert "The same command goes on" in out
        until(lambda: left_in(tmp_path) == [])
    assert [row.status for row in ledger.read(folder).rows] == ["ok"]


def test_an_address_where_no_ray_is_leaves_nothing(tmp_path: Path, ray_launcher: None) -> None:
    there = ("hydra/launcher=ray", "hydra.launcher.ray.init.address=127.0.0.1:9")
    searched = search(tmp_path, "search=grid", f"{TOP}=0.3,0.7", *there, name="grid")
    assert searched.done.code == 2, searched.done.text
    assert "no Ray cluster can be reached there" in searched.done.err
    assert not searched.folder.exists()
