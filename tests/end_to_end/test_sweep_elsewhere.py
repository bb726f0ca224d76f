"""A sweep by Hydra's Ray launcher, in a real Ray cluster on this machine."""

import socket
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.commands import record_of, run
from tests.end_to_end.many_processes import left_in, until
from tests.end_to_end.test_sweep import FAULT, LR, PATH, Swept, arguments, folder_of, sweeping
from wellfed.process import MAY_FORK
from wellfed.study import ledger

pytestmark = [pytest.mark.skipif(not MAY_FORK, reason="forks"), pytest.mark.slow]
RAY = ("hydra/launcher=ray", "hydra.launcher.ray.init.address=local", "+hydra.launcher.ray.init.num_cpus=2")


@pytest.fixture(autouse=True)
def ray_launcher() -> None:
    """Skips where the extra is not installed; it is not imported: that is for processes of their own."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")


def swept_by_ray(cwd: Path, *more: str) -> Swept:
    done = run("train.py", *arguments(cwd, *more, *RAY), cwd=cwd, PYTHONPATH=PATH, timeout_s=1200)
    return Swept(done, folder_of(cwd))


def jobs_in(cwd: Path) -> list[psutil.Process]:
    """Workers of Ray that run a trial."""
    found = []
    for process in left_in(cwd):
        try:
            found += [process] if "ray::_run_job" in " ".join(process.cmdline()) else []
        except psutil.Error:
            continue
    return found


def test_trials_end_as_they_do_here_and_the_best_are_measured_again(tmp_path: Path) -> None:
    axes = (f"{FAULT}=none,raise", f"{LR}=0.1,0.2")
    swept = swept_by_ray(tmp_path, *axes)
    assert swept.done.code == 0, swept.done.text
    trials = [row for row in swept.rows if row.kind == "trial"]
    assert Counter(row.status for row in trials) == {"ok": 2, "failed": 2}
    assert Counter(row.kind for row in swept.rows) == {"trial": 4, "confirm": 6}
    assert {row.host for row in swept.rows} == {socket.gethostname()}
    assert all(row.machine and row.device for row in swept.rows if row.status == "ok")
    assert "planted: step went wrong" in swept.row(f"{FAULT}=raise", f"{LR}=0.1").error["message"]
    for row in swept.rows:
        assert record_of(swept.folder / row.folder)["status"] == row.status
    assert [path.name for path in swept.folder.parent.iterdir()] == ["quick"]
    assert swept_by_ray(tmp_path, *axes).rows == swept.rows
    until(lambda: left_in(tmp_path) == [])


@pytest.mark.parametrize("retries", [0, 1])
def test_a_worker_that_is_killed_costs_its_trial_and_the_same_command_goes_on(tmp_path: Path, retries: int) -> None:
    axes = (f"{FAULT}=slow", f"{LR}=0.1,0.2", "sweep.trial_steps=40")
    ray = (f"+hydra.launcher.ray.remote.max_retries={retries}", *RAY)
    with sweeping(tmp_path, *axes, *ray) as process:
        until(lambda: len(list(folder_of(tmp_path).glob("*/steps.csv"))) == 2, process)
        jobs_in(tmp_path)[0].kill()
        out, err = process.communicate(timeout=300)
    rows = ledger.read(folder_of(tmp_path)).rows
    if retries:  # the retry refuses the folder of the first
        assert Counter(row.status for row in rows) == {"ok": 1, "killed": 1}
    else:
        assert "Hydra's launcher failed: WorkerCrashedError" in out, out + err
        assert "The same command again runs what is missing." in out
        assert len(rows) < 2
    again = swept_by_ray(tmp_path, *axes, "sweep.retry=[killed]")
    assert again.done.code == 0, again.done.text
    latest = ledger.read(again.folder).latest.values()
    assert [row.status for row in latest] == ["ok"] * 2
    assert Counter(row.kind for row in again.rows)["confirm"] == 6
