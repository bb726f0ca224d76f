"""Sweeps whose trials run in a real Ray cluster on this machine, and in jobs of submitit's local executor."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.commands import environment, record_of, run
from tests.end_to_end.many_processes import left_in, until
from tests.end_to_end.test_sweep import FAULT, LR, PATH, Swept, arguments, folder_of, sweep, sweeping
from wellfed.process import MAY_FORK
from wellfed.study import ledger
from wellfed.study.study_files import SweepFile

pytestmark = pytest.mark.skipif(not MAY_FORK, reason="forks")
NODE = "wellfed.study.executors.remote"


OF_ITS_OWN = ["hydra.launcher.ray.init.address=local"]
"""Starts a cluster, though that of another test may run here."""


@pytest.fixture
def ray_launcher() -> None:
    """Skips where the extra is not installed; it is not imported: that is for processes of their own."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")


@pytest.fixture
def submitit_launcher() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")


class RayNodes:
    """``ray_nodes.py``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._says().removeprefix("address ")

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._says() == f"done {command}"

    def _says(self) -> str:
        stream = self._process.stdout
        assert stream is not None
        end_s = time.monotonic() + 180
        while time.monotonic() < end_s:
            if select.select([stream], [], [], 5)[0]:
                line = stream.readline().strip()
                if line.startswith(("address ", "done ")):
                    return line
            assert self._process.poll() is None
        raise TimeoutError("the cluster does not answer")


@contextmanager
def ray_cluster(number: int) -> Iterator[RayNodes]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(number)],
        env=environment(RAY_worker_niceness="0"),  # the machine is shared with other tests
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield RayNodes(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def node_processes(cwd: Path) -> list[psutil.Process]:
    """Those that run a trial each, without what they forked."""
    found = [each for each in left_in(cwd) if NODE in " ".join(_command(each))]
    pids = {each.pid for each in found}
    return [each for each in found if _parent(each) not in pids]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def trials_running(cwd: Path) -> int:
    """That have begun their steps and have no row."""
    ended = {row.folder for row in ledger.read(folder_of(cwd)).rows}
    return len({path.parent.name for path in folder_of(cwd).glob("*/run.json")} - ended)


def patiently(cwd: Path, *more: str) -> Swept:
    """As `sweep`: a job that imports torch for each trial takes its time where other tests run."""
    done = run("train.py", *arguments(cwd, *more), cwd=cwd, PYTHONPATH=PATH, timeout_s=1200)
    return Swept(done, folder_of(cwd))


def complete(swept: Swept) -> Counter[str]:
    """Statuses of the points' last trials; every point has one."""
    found = ledger.read(swept.folder)
    assert set(found.latest) == set(SweepFile.read(swept.folder).ids)
    assert found.damaged == ()
    return Counter(row.status for row in found.latest.values())


def interrupted(process: subprocess.Popen[str], cwd: Path) -> str:
    """Ctrl-C, and what the sweep then says."""
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert "The same command again runs what is missing." in out
    until(lambda: left_in(cwd) == [])
    return out


# -- Ray -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_worker_and_gets_a_node_leaves_a_complete_table(
    tmp_path: Path, ray_launcher: None
) -> None:
    rates = ",".join(f"0.{number}" for number in range(1, 8))
    with ray_cluster(2) as nodes:
        there = ["hydra/launcher=ray", f"hydra.launcher.ray.init.address={nodes.address}"]
        axes = [f"{FAULT}=slow", f"{LR}={rates}", "sweep.trial_steps=100", *there]
        with sweeping(tmp_path, *axes) as process:
            until(lambda: len(ledger.read(folder_of(tmp_path)).rows) >= 1, process)  # while others run
            until(lambda: len(node_processes(tmp_path)) == 2, process)  # one a machine
            until(lambda: trials_running(tmp_path) >= 1, process)
            worker = psutil.Process(node_processes(tmp_path)[0].pid).parent()
            assert "ray::" in " ".join(worker.cmdline())
            worker.kill()
            nodes.tell("add")
            until(lambda: len(node_processes(tmp_path)) == 3, process)
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert "Traceback" not in out + err
        swept = patiently(tmp_path, *axes)
        assert complete(swept) == {"ok": 6, "killed": 1}
        (killed,) = [row for row in swept.rows if row.status == "killed"]
        assert killed.error is not None
        assert killed.error["message"].startswith("its worker process was killed")
        assert "killed in " in out
        assert Counter(row.kind for row in swept.rows) == {"trial": 7, "confirm": 9}
        assert {row.host for row in swept.rows if row.status == "ok"} == {socket.gethostname()}
        assert all(row.machine for row in swept.rows if row.status == "ok")
        again = sweep(tmp_path, *axes, "sweep.retry=[killed]")
        assert complete(again) == {"ok": 7}
    until(lambda: left_in(tmp_path) == [])


@pytest.mark.slow
def test_a_ray_node_that_goes_costs_its_trial_alone_and_ctrl_c_ends_what_runs_there(
    tmp_path: Path, ray_launcher: None
) -> None:
    with ray_cluster(2) as nodes:
        there = ["hydra/launcher=ray", f"hydra.launcher.ray.init.address={nodes.address}"]
        axes = [f"{FAULT}=none,hang", f"{LR}=0.1,0.2", *there]
        with sweeping(tmp_path, *axes) as process:
            until(lambda: len(ledger.read(folder_of(tmp_path)).rows) == 2, process)
            until(lambda: trials_running(tmp_path) == 2, process)  # both hang
            nodes.tell("remove")
            until(lambda: len(ledger.read(folder_of(tmp_path)).rows) == 3, process)
            interrupted(process, tmp_path)
        found = ledger.read(folder_of(tmp_path)).rows
        assert Counter(row.status for row in found) == {"ok": 2, "killed": 1}
        again = sweep(tmp_path, *axes, "sweep.timeout_s=4")
        assert complete(again) == {"ok": 2, "killed": 1, "timeout": 1}


@pytest.mark.slow
def test_what_becomes_of_trials_is_the_same_in_a_cluster_that_ray_starts_itself(
    tmp_path: Path, ray_launcher: None
) -> None:
    bad = {"raise": "failed", "build": "invalid", "kill": "killed", "oom": "oom", "hang": "timeout"}
    swept = same_ends(tmp_path, "ray", bad)
    message = (swept.row(f"{FAULT}=raise").error or {})["message"]
    assert message.startswith("RuntimeError: planted: step went wrong")
    assert not (swept.folder / ".scratch").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_heard", [False, True], ids=["nobody_listens", "no_ray_listens"])
def test_a_cluster_that_can_not_be_reached_is_told_and_nothing_is_written(
    tmp_path: Path, ray_launcher: None, is_heard: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not is_heard:
            server.close()
        there = ["hydra/launcher=ray", f"hydra.launcher.ray.init.address=127.0.0.1:{port}"]
        began_s = time.monotonic()
        swept = sweep(tmp_path, f"{LR}=0.1,0.2", *there)
    assert swept.done.code == 2, swept.done.text
    assert f"hydra.launcher.ray.init.address=127.0.0.1:{port}: no Ray cluster can be reached there." in swept.done.err
    assert "Traceback" not in swept.done.text
    assert not swept.folder.exists()
    assert time.monotonic() - began_s < 90


# -- submitit --------------------------------------------------------------------------------------------------------


def same_ends(cwd: Path, launcher: str, bad: dict[str, str]) -> Swept:
    """Trials end as they do here, and the two good ones are confirmed; ``bad``: fault -> status."""
    axes = [f"{FAULT}={','.join(['none', 'slow', *bad])}", "sweep.timeout_s=10", f"hydra/launcher={launcher}"]
    axes += OF_ITS_OWN if launcher == "ray" else []
    swept = patiently(cwd, *axes)
    assert swept.done.code == 0, swept.done.text
    assert complete(swept) == {"ok": 2, **dict.fromkeys(bad.values(), 1)}, swept.done.text
    assert Counter(row.kind for row in swept.rows) == {"trial": 2 + len(bad), "confirm": 6}
    for fault, status in bad.items():
        assert swept.row(f"{FAULT}={fault}").status == status
    for row in swept.rows:
        if row.folder:
            record = record_of(swept.folder / row.folder)
            assert record["status"] == row.status
            assert row.host == record["host_name"]
    again = patiently(cwd, *axes)
    assert [row for row in again.rows if row.status != "invalid"] == [
        row for row in swept.rows if row.status != "invalid"
    ]
    assert left_in(cwd) == []
    return swept


@pytest.mark.slow
def test_what_becomes_of_trials_is_the_same_in_jobs_of_submitit(tmp_path: Path, submitit_launcher: None) -> None:
    swept = same_ends(tmp_path, "submitit_local", {"hang": "timeout"})
    assert list((swept.folder / ".submitit").rglob("*.pkl")) == []


@pytest.mark.slow
def test_a_job_that_is_killed_is_a_row_and_ctrl_c_ends_the_one_that_runs(
    tmp_path: Path, submitit_launcher: None
) -> None:
    axes = [f"{FAULT}=hang", f"{LR}=0.1,0.2", "hydra/launcher=submitit_local"]
    with sweeping(tmp_path, *axes) as process:
        until(lambda: trials_running(tmp_path) == 1, process)
        psutil.Process(node_processes(tmp_path)[0].pid).parent().kill()
        until(lambda: len(ledger.read(folder_of(tmp_path)).rows) == 1, process)
        until(lambda: trials_running(tmp_path) == 1, process)
        interrupted(process, tmp_path)
    (row,) = ledger.read(folder_of(tmp_path)).rows
    assert row.status == "killed"
    assert "its job has ended without a result" in (row.error or {})["message"]
    again = patiently(tmp_path, *axes, "sweep.timeout_s=4")
    assert complete(again) == {"killed": 1, "timeout": 1}


@pytest.mark.slow
def test_jobs_that_outlive_their_sweep_end_when_the_next_begins(tmp_path: Path, submitit_launcher: None) -> None:
    axes = [f"{FAULT}=hang,none", f"{LR}=0.1", "hydra/launcher=submitit_local"]
    with sweeping(tmp_path, *axes) as process:
        until(lambda: trials_running(tmp_path) == 1, process)
        process.kill()
        process.wait()
        (orphan,) = node_processes(tmp_path)
        again = sweep(tmp_path, *axes, "sweep.timeout_s=4")
        assert not orphan.is_running()
    assert complete(again) == {"ok": 1, "timeout": 1}
    assert len(list(again.folder.glob("*.attempt1"))) == 1  # that of the job that was left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["hydra/launcher=submitit_slurm"], "hydra/launcher=submitit_slurm: there is no sbatch here."),
        (["hydra/launcher=submitit_local", "hydra.launcher.nodes=2"], "hydra.launcher.nodes=2: a trial is one task"),
        (
            ["hydra/launcher=submitit_local", "+hydra.launcher.partiton=gpu"],
            "hydra.launcher: submitit refuses them: Unknown argument 'partiton'",
        ),
    ],
    ids=["no_slurm", "nodes", "parameter"],
)
def test_what_submitit_can_not_do_is_refused_and_nothing_is_written(
    tmp_path: Path, submitit_launcher: None, more: list[str], words: str
) -> None:
    swept = sweep(tmp_path, f"{LR}=0.1,0.2", *more)
    assert swept.done.code == 2, swept.done.text
    assert words in swept.done.err
    assert not swept.folder.exists()
