"""One run over two machines: here two torchrun agents that meet on this one, each with its own processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.end_to_end.commands import ROOT, environment, only_folder, record_of, run_folders, train, weights_of
from wellfed.record.entries import RunRecord

pytestmark = pytest.mark.slow
LIMIT_S = 400
CPU = ("trainer.accelerator=cpu", "workload.data.scale=0.02", "workload.model.encoder_layers=1", "logger=none")
LONG = ("trainer.max_epochs=4000", "trainer.checkpoint_every_steps=5", "telemetry.ceiling_steps=0")
QUICK = ("trainer.max_steps=12", "trainer.max_epochs=100", "telemetry.ceiling_steps=3")


@dataclass
class Nodes:
    """Two agents and what they say."""

    folder: Path
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, node: int, *arguments: str, port: int, ranks: int = 1, restarts: int = 0, **more: Any) -> None:
        """Start torchrun for a node with ``arguments`` for train.py; ``root``: another copy of the project."""
        root, environ = more.pop("root", ROOT), more.pop("environ", {})
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}"]
        if restarts:
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={self.folder.name}"]
        else:  # of these the first is node 0
            words += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        words += [f"--max-restarts={restarts}", str(root / "src" / "train.py"), *arguments]
        search = [str(self.folder), str(root / "src"), str(root), environ.get("PYTHONPATH", "")]
        with (self.folder / f"node{node}.out").open("wb") as out, (self.folder / f"node{node}.err").open("wb") as err:
            env = {**environment(**environ), "PYTHONPATH": os.pathsep.join(search)}
            self.agents.append(
                subprocess.Popen(words, cwd=self.folder, env=env, stdout=out, stderr=err, start_new_session=True)
            )

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Their exit codes."""
        until = time.monotonic() + limit_s
        return [agent.wait(max(0.1, until - time.monotonic())) for agent in self.agents]

    def said(self, node: int, kind: str = "err") -> str:
        """All that the processes of a node have said, and their agent."""
        return (self.folder / f"node{node}.{kind}").read_text()

    @property
    def text(self) -> str:
        return "\n".join(self.said(node, kind)[-3000:] for node in (0, 1) for kind in ("out", "err"))

    def rank(self, node: int) -> psutil.Process:
        """The first process of a node."""
        return psutil.Process(self.agents[node].pid).children()[0]

    def await_checkpoint(self, name: str = "last-1.ckpt") -> None:
        """Until it is there."""
        until = time.monotonic() + LIMIT_S / 2
        while not list(self.folder.glob(f"logs/recsys/runs/*/checkpoints/{name}")):
            assert time.monotonic() < until, self.text
            assert all(agent.poll() is None for agent in self.agents), self.text
            time.sleep(0.2)

    def end(self) -> None:
        """Nothing that was started stays."""
        for agent in self.agents:
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(agent.pid)
                for process in [*own.children(recursive=True), own]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(agent.pid, signal.SIGKILL)  # ranks whose agent was killed
            agent.wait()


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    both = Nodes(tmp_path)
    yield both
    both.end()


def both(nodes: Nodes, port: int, *arguments: str, **more: Any) -> None:
    for node in (0, 1):
        nodes.start(node, *CPU, "trainer.num_nodes=2", *arguments, port=port, **more)


def test_two_nodes_leave_one_run_and_learn_what_one_process_does(nodes: Nodes, port: int, tmp_path: Path) -> None:
    """And go on as one."""
    learned = ("workload.effective_batch_size=501", *QUICK)
    both(nodes, port, *learned, "trainer.devices=2", ranks=2)
    alone = tmp_path / "alone"
    alone.mkdir()
    done = train(*CPU, *learned, cwd=alone, fresh=True)
    assert nodes.wait() == [0, 0], nodes.text
    assert done.code == 0, done.text
    folder, of_one = only_folder(tmp_path), only_folder(alone)
    record, one = record_of(folder), record_of(of_one)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", 12, one["samples"])
    assert record["plan"]["trainer.num_nodes"]["because"].endswith("2 nodes x 2 devices = 4 ranks")
    assert record["plan"]["memory.micro_batch"]["value"] == 126
    assert record["launch"] == {"by": "torchrun", "job": None, "attempt": 0}
    for name, value in weights_of(of_one).items():
        assert (value - weights_of(folder)[name]).abs().max() < 1e-4, name
    for name in ("val/ndcg_at_10", "test/ndcg_at_10"):
        assert record["metrics"][name] == pytest.approx(one["metrics"][name], abs=5e-3)
    assert nodes.said(0, "out").count("\nloader  ") == 1
    assert "loader  " not in nodes.said(1, "out")
    for name in ("telemetry.csv", "telemetry.node1.csv"):
        assert {row.split(",")[3] for row in (folder / name).read_text().splitlines()[1:]} == {"-1"}
    more = ("trainer.max_steps=16", "trainer.num_nodes=1", "trainer.devices=1")
    done = train(f"resume={folder}", *more, cwd=tmp_path, fresh=True)
    assert done.code == 0, done.text
    record = record_of(folder)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", 16, one["samples"] // 12 * 16)


@pytest.mark.parametrize("victim", ["rank of node 1", "rank 0", "node 1"])
def test_a_rank_or_node_that_is_killed_ends_all_and_the_run_goes_on(nodes: Nodes, port: int, victim: str) -> None:
    both(nodes, port, *LONG)
    nodes.await_checkpoint()
    node = 0 if victim == "rank 0" else 1
    rank, others = nodes.rank(node), nodes.rank(1 - node)
    if victim == "node 1":
        nodes.agents[1].kill()
    rank.kill()
    others.wait(90)
    assert 0 not in nodes.wait(90)
    folder = only_folder(nodes.folder)
    assert RunRecord.read(folder).status in ("failed", "killed")
    more = ("trainer.max_steps=200", "trainer.num_nodes=1", "trainer.devices=1")
    done = train("resume=auto", *more, cwd=nodes.folder, fresh=True)
    assert done.code == 0, done.text
    assert (record_of(folder)["status"], record_of(folder)["steps"]) == ("ok", 200)


def test_torchrun_starts_them_again_and_they_go_on(nodes: Nodes, port: int) -> None:
    both(nodes, port, "resume=auto", "trainer.max_steps=400", *LONG, restarts=1)
    nodes.await_checkpoint()
    nodes.rank(1).kill()
    assert nodes.wait() == [0, 0], nodes.text
    folder = only_folder(nodes.folder)
    record = record_of(folder)
    assert (record["status"], record["steps"]) == ("ok", 400)
    assert nodes.folder / record["resumed_from"] == folder / "checkpoints" / "last.ckpt"
    (event,) = [event for event in record["events"] if event["kind"] == "resume"]
    assert event["step"] >= 5


def test_a_stop_on_one_node_stops_both_with_a_checkpoint(nodes: Nodes, port: int) -> None:
    both(nodes, port, *LONG)
    nodes.await_checkpoint()
    nodes.agents[1].send_signal(signal.SIGTERM)
    assert 0 not in nodes.wait()
    folder = only_folder(nodes.folder)
    record = record_of(folder)
    assert record["status"] == "interrupted"
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == record["steps"]


def refused(nodes: Nodes) -> str:
    """What rank 0 says of a run that neither node has begun."""
    assert nodes.wait() == [1, 1], nodes.text  # torchrun's own
    for node in (0, 1):
        assert "exitcode: 2" in nodes.said(node) or "exitcode  : 2" in nodes.said(node), nodes.text
    assert not run_folders(nodes.folder)
    return nodes.said(0)


MINE = """
import os
from workloads.recsys.data import datasets as those
from wellfed.errors import DataError

def datasets(**given):
    if "1" in (os.environ.get("GROUP_RANK"), os.environ.get("LOCAL_RANK")):
        raise DataError("/data/ratings.csv: there is no such file. Bring it to all machines.")
    return those(**given)
"""


def test_what_fails_on_another_node_is_told_by_rank_0(nodes: Nodes, port: int) -> None:
    (nodes.folder / "mine.py").write_text(MINE)
    data = ["workload.data._target_=mine.datasets"]
    both(nodes, port, *QUICK, *data)
    said = refused(nodes)
    assert f"Rank 1 on node 1 ({socket.gethostname()}): /data/ratings.csv: there is no such file." in said
    assert "/data/ratings.csv" not in nodes.said(1)


FAILS = """
import os
import signal
import lightning.pytorch as pl

class Fails(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 8 and trainer.global_rank == 1:
            if os.environ["HOW"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such column")
"""


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_rank_that_lightning_has_started_ends_the_run(tmp_path: Path, how: str) -> None:
    (tmp_path / "mine.py").write_text(FAILS)
    fails = ["+callbacks.fails._target_=mine.Fails"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = train(*CPU, *LONG, "trainer=ddp", *fails, cwd=tmp_path, fresh=True, HOW=how, PYTHONPATH=path)
    folder = only_folder(tmp_path)
    record = RunRecord.read(folder)
    assert done.code not in (0, 2)
    assert record.status in (("failed",) if how == "raises" else ("failed", "killed"))
    if how == "raises":
        assert record.error is not None
        assert record.error["message"].startswith("Rank 1: ValueError: no such column")
