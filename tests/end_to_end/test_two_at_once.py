"""Two commands at the same instant and in the same folder, here and as if on two machines: docs/reliability.md."""

import csv
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import ROOT, Done, only_folder, record_of, run_folders
from tests.end_to_end.many_processes import started, until
from tests.kit.meeting import can_be_elsewhere, command, elsewhere, together
from wellfed.process import MAY_FORK
from wellfed.study.rows import read_rows

pytestmark = [pytest.mark.skipif(not MAY_FORK, reason="forks"), pytest.mark.slow]
PLANTED = ROOT / "tests" / "study" / "sweep" / "planted"
PATH = os.pathsep.join(filter(None, [str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH")]))
LOCK = "wellfed.run.folder.lock.only_one"
STEPS = 40
LONG = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every_steps=4")
TWO_MACHINES = pytest.param(
    ("one", "two"),
    id="two machines",
    marks=pytest.mark.skipif(sys.platform != "linux" or not can_be_elsewhere(), reason="no namespaces may be made"),
)
HOSTS = [pytest.param((None, None), id="one machine"), TWO_MACHINES]
Hosts = tuple[str | None, str | None]


def fixed(cwd: Path) -> list[str]:
    """The flags and the two overrides that a resumed run needs, too."""
    folder = cwd / "conf" / "workload"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planted.yaml").write_text((PLANTED / "planted.yaml").read_text())
    return ["--config-dir", str(cwd / "conf"), "workload=planted"]


def words(cwd: Path, *more: str) -> list[str]:
    return [*fixed(cwd), "logger=none", "loader=baseline", "telemetry=none", *more]


def both(
    cwd: Path, function: str, script: str, arguments: Sequence[str], hosts: Hosts = (None, None), **more: str
) -> list[Done]:
    """Two processes of one command, which meet in front of a function."""
    typed = command(function, script, *arguments)
    commands = [typed if host is None else elsewhere(host, typed) for host in hosts]
    return together(commands, cwd.with_name(f"{cwd.name}-meeting"), cwd=cwd, PYTHONPATH=PATH, **more)


def one_of(done: Sequence[Done], folder: Path, hosts: Hosts) -> int:
    """Returns which of the two has won, once the other was told by one message who has the folder."""
    assert sorted(each.code for each in done) == [0, 2], done
    winner = [each.code for each in done].index(0)
    told = " ".join(done[1 - winner].err.split())
    host = hosts[winner] or socket.gethostname()
    number = r"\d+" if hosts[winner] is None else "1"
    assert re.search(
        rf"{re.escape(str(folder))}: another process is writing to it \(process {number} on {re.escape(host)}\)\. "
        r"Wait for its end, stop it, or take another folder\.$",
        told,
    ), told
    assert "Traceback" not in told
    return winner


def check_whole(folder: Path, saved: int = 0) -> None:
    """Checks that a run has ended well, with each step once; a kill may have lost rows of steps up to `saved`."""
    assert (record_of(folder)["status"], record_of(folder)["steps"]) == ("ok", STEPS)
    with (folder / "steps.csv").open(newline="") as stream:
        steps = [int(row["step"]) for row in csv.DictReader(stream)]
    assert steps == sorted(set(steps))
    assert [step for step in steps if step > saved] == list(range(saved + 1, STEPS + 1))
    assert not (folder / ".lock.json").exists()


def killed(cwd: Path) -> Path:
    """Returns the folder of a run that was killed after a checkpoint."""
    arguments = words(cwd, *LONG, "workload.model.fault=slow")
    with started("train.py", arguments, cwd=cwd, python_path=PATH) as process:
        until(lambda: list(cwd.glob("logs/planted/runs/*/checkpoints/last.ckpt")), process)
        process.kill()
        process.wait()
    folder = only_folder(cwd, "planted")
    assert json.loads((folder / "run.json").read_text())["status"] == "running"
    return folder.relative_to(cwd)


@pytest.mark.parametrize("hosts", HOSTS)
def test_of_two_runs_in_one_folder_one_is_told_who_has_it(tmp_path: Path, hosts: Hosts) -> None:
    done = both(tmp_path, LOCK, "train.py", words(tmp_path, *LONG, "hydra.run.dir=mine"), hosts)
    winner = one_of(done, Path("mine"), hosts)
    check_whole(tmp_path / "mine")
    assert record_of(tmp_path / "mine")["host_name"] == (hosts[winner] or socket.gethostname())


@pytest.mark.parametrize("asked", ["auto", "the folder"])
def test_of_two_that_resume_one_run_one_goes_on_with_it(tmp_path: Path, asked: str) -> None:
    folder = killed(tmp_path)
    step = torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    resume = f"resume={'auto' if asked == 'auto' else folder}"
    done = both(tmp_path, LOCK, "train.py", [*fixed(tmp_path), resume])
    one_of(done, folder, (None, None))
    check_whole(tmp_path / folder, step)
    assert len(run_folders(tmp_path, "planted")) == 1


@pytest.mark.parametrize("hosts", HOSTS)
def test_of_two_sweeps_of_one_name_one_runs_each_point_once(tmp_path: Path, hosts: Hosts) -> None:
    axis = "workload.optimizer.lr=0.1,0.01"
    arguments = ["-m", *words(tmp_path, "sweep=quick", "sweep.trial_steps=10", axis)]
    done = both(tmp_path, LOCK, "train.py", arguments, hosts)
    folder = Path("logs", "planted", "sweeps", "quick")
    one_of(done, folder, hosts)
    found = read_rows(tmp_path / folder)
    counted = Counter((row.point, row.kind) for row in found.rows)
    assert len(found.latest) == 2
    assert {number for (_, kind), number in counted.items() if kind == "trial"} == {1}
    assert {row.status for row in found.rows} == {"ok"}
    assert not list((tmp_path / folder).glob("*.attempt*"))
