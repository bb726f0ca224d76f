"""Jobs that submitit sends to Slurm: a simulated one, which starts them at once on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.study.clusters.test_keeper import settings
from wellfed.study.clusters.cluster import ClusterLost, Ended, Order
from wellfed.study.clusters.submitit_cluster import SubmititCluster

pytestmark = [pytest.mark.guests, pytest.mark.slow]  # each job imports submitit
SLURM = Path(__file__).with_name("fake_slurm")


class Slurm:
    """Sends orders, and keeps what came of them."""

    def __init__(self, folder: Path, **params: object) -> None:
        pytest.importorskip("submitit")
        self.folder, self.said, self.ended = folder, [], {}
        self.cluster = SubmititCluster("slurm", {"timeout_min": 5, **params}, folder / ".submitit", None)
        self.cluster.open(settings(folder), self.said.append)

    def run(self, orders: Sequence[Order]) -> None:
        try:
            for each in self.cluster.run(orders, alone=False):
                if isinstance(each, Ended):
                    self.ended[each.key] = each.told.answer
        finally:
            self.cluster.close()

    @property
    def handed_over(self) -> list[Path]:
        """What is left of it on the disk."""
        return list((self.folder / ".submitit").rglob("*.pkl"))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gets those of the jobs that were sent."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PATH", os.pathsep.join([str(SLURM), os.environ["PATH"]]))
    return folder


def test_each_size_is_an_array_of_jobs_and_nothing_of_them_is_left(tmp_path: Path, scripts: Path) -> None:
    slurm = Slurm(tmp_path, partition="gpu", array_parallelism=2)
    slurm.run([Order("a", b"1 + 1"), Order("b", b"2 + 2", num_gpus=2), Order("c", b"os._exit(3)")])
    assert slurm.ended == {"a": b"2", "b": b"4", "c": None}
    array, single = ((scripts / f"job_{number}").read_text() for number in (1, 2))
    assert "#SBATCH --array=0-1%2" in array
    assert "--gpus-per-node" not in array
    assert "#SBATCH --gpus-per-node=2" in single
    assert "#SBATCH --partition=gpu" in single
    assert slurm.handed_over == []


@pytest.mark.parametrize("number", [1, 2], ids=["a job", "an array"])
def test_what_sbatch_refuses_is_told_in_its_words_and_nothing_of_it_is_left(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("FAKE_SLURM_TAKES", "0")
    slurm = Slurm(tmp_path)
    with pytest.raises(ClusterLost, match="Slurm takes no jobs: sbatch: error: invalid partition specified: nope"):
        slurm.run([Order(str(each), b"1") for each in range(number)])
    assert slurm.ended == {}
    assert slurm.handed_over == []


def test_what_was_sent_before_a_refusal_ends_first(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SLURM_TAKES", "1")
    slurm = Slurm(tmp_path)
    with pytest.raises(ClusterLost, match="invalid partition"):
        slurm.run([Order("a", b"time.sleep(2) or 2"), Order("b", b"2 + 2", num_gpus=2)])
    assert slurm.ended == {"a": b"2"}
    (said,) = slurm.said
    assert said.endswith("Those that it has go on.")
