"""Trials as tasks of a real Ray cluster on this machine, whose nodes claim GPUs that are not there."""

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.made_trials import evaluating, made_settings, made_trial
from wellfed.errors import ConfigError
from wellfed.study.executors.executor import ExecutorLost, Trial
from wellfed.study.executors.ray import RayExecutor
from wellfed.study.row import Row

pytestmark = [pytest.mark.guests, pytest.mark.slow]
CPUS = sorted(os.sched_getaffinity(0))
VISIBLE = "os.environ.get('CUDA_VISIBLE_DEVICES')"
SPAN = "(time.time(), time.sleep(1), time.time())"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two machines: one of 2 GPUs and 4 CPUs, one of 1 GPU and 2 CPUs."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, **small})
    cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80_000_000)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


class Machines:
    """Runs trials there, and keeps what became of them."""

    def __init__(self, folder: Path, address: str) -> None:
        self.said: list[str] = []
        self.executor = RayExecutor(made_settings(folder, self.said), {"address": address}, {})
        self.executor._process = evaluating()

    def run(self, trials: Sequence[Trial], **how: Any) -> dict[str, Row]:
        with self.executor:
            return {trial.key: row for trial, row in self.executor.run(trials, **how)}


def most_at_once(rows: dict[str, Row]) -> int:
    spans = [eval(row.device) for row in rows.values()]
    return max(sum(begin <= other < end for begin, _, end in spans) for other, *_ in spans)


def test_each_trial_has_its_gpus_and_what_no_machine_has_is_not_started(tmp_path: Path, address: str) -> None:
    trials = [made_trial("one", VISIBLE), made_trial("two", VISIBLE, devices=2), made_trial("cpu", SPAN, gpu="cpu")]
    machines = Machines(tmp_path, address)
    rows = machines.run([*trials, made_trial("three", devices=3)])
    assert rows["one"].device in ("0", "1")
    assert sorted(rows["two"].device.split(",")) == ["0", "1"]
    assert (rows["cpu"].status, rows["three"].status) == ("ok", "infeasible")
    assert "no machine there has more GPUs than 2." in (rows["three"].error or {})["message"]


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU can't be shared")
def test_each_gpu_has_an_even_share_of_the_cpus(tmp_path: Path, address: str) -> None:
    affinity = f"({VISIBLE}, sorted(os.sched_getaffinity(0)), time.sleep(1))"
    rows = Machines(tmp_path, address).run([made_trial(str(number), affinity) for number in range(3)])
    half = len(CPUS) // 2
    shares = [("0", CPUS[:half]), ("0", CPUS), ("1", CPUS[half : 2 * half])]  # the second machine has one GPU
    assert sorted(eval(row.device)[:2] for row in rows.values()) == shares


def test_trials_on_processors_are_one_a_machine_at_a_time(tmp_path: Path, address: str) -> None:
    rows = Machines(tmp_path, address).run([made_trial(str(number), SPAN, gpu="cpu") for number in range(5)])
    assert {row.status for row in rows.values()} == {"ok"}
    assert most_at_once(rows) <= 2


def test_alone_is_one_a_machine_at_a_time_though_there_are_gpus(tmp_path: Path, address: str) -> None:
    rows = Machines(tmp_path, address).run([made_trial(str(number), SPAN) for number in range(5)], alone=True)
    assert most_at_once(rows) <= 2


def test_a_worker_that_is_killed_costs_its_trial_alone(tmp_path: Path, address: str) -> None:
    kill_worker = "os.kill(os.getppid(), 9) or time.sleep(60)"
    rows = Machines(tmp_path, address).run([made_trial("lost", kill_worker), made_trial("next")])
    assert (rows["lost"].status, rows["next"].status) == ("killed", "ok")
    error = rows["lost"].error or {}
    assert error["message"].startswith("its worker process was killed")
    assert error["advice"] == "sweep.retry=[killed] runs it again."


def test_a_machine_that_is_unfit_is_left_out_and_its_trials_run_elsewhere(tmp_path: Path, address: str) -> None:
    is_first = f"os.path.exists({str(tmp_path / 'seen')!r}) or open({str(tmp_path / 'seen')!r}, 'w')"
    unfit_once = f"1 if ({is_first}) is True else sys.exit('it has other code')"
    machines = Machines(tmp_path, address)
    rows = machines.run([made_trial("a", unfit_once)])
    assert rows["a"].status == "ok"
    assert machines.said == [f"{socket.gethostname()} is left out: it has other code"]


def test_where_every_machine_is_unfit_nothing_more_is_tried(tmp_path: Path, address: str) -> None:
    machines = Machines(tmp_path, address)
    with pytest.raises(ExecutorLost, match="No machine of the cluster can run the trials"):
        machines.run([made_trial("a", "sys.exit('it has other code')")])
    assert len(machines.said) == 2


@pytest.mark.parametrize("is_heard", [False, True], ids=["nobody_listens", "no_ray_listens"])
def test_an_address_without_ray_is_refused_within_seconds(
    tmp_path: Path, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("wellfed.study.executors.ray._REACH_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        if not is_heard:
            server.close()
        with pytest.raises(ConfigError, match=f"address={there}: no Ray cluster can be reached there"):
            Machines(tmp_path, there).run([made_trial("a")])
