"""Trials as jobs that submitit sends to Slurm: a simulated one, which starts them at once on this machine."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.made_trials import evaluating, made_settings, made_trial
from wellfed.study.executors.executor import ExecutorLost, Trial
from wellfed.study.executors.submitit import SubmititExecutor

pytestmark = [pytest.mark.guests, pytest.mark.slow]  # each job imports submitit
SLURM = Path(__file__).with_name("fake_slurm")


class Slurm:
    """Sends trials, and keeps what became of them."""

    def __init__(self, folder: Path, **params: object) -> None:
        pytest.importorskip("submitit")
        self.folder, self.said, self.ended, self.messages = folder, [], {}, {}
        self.executor = SubmititExecutor(made_settings(folder, self.said), "slurm", {"timeout_min": 5, **params})
        self.executor._process = evaluating()

    def run(self, trials: Sequence[Trial]) -> None:
        with self.executor:
            for trial, row in self.executor.run(trials):
                self.ended[trial.key] = (row.status, row.device)
                self.messages[trial.key] = "" if row.error is None else row.error["message"]

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
    two = made_trial("b", "2 + 2", devices=2, accelerator="gpu")
    slurm.run([made_trial("a", "1 + 1"), two, made_trial("c", "os.kill(os.getpid(), 9)")])
    assert slurm.ended == {"a": ("ok", "2"), "b": ("ok", "4"), "c": ("killed", "")}
    assert slurm.messages["c"] == "the process that watched the trial was ended by SIGKILL"
    array, single = ((scripts / f"job_{number}").read_text() for number in (1, 2))
    assert "#SBATCH --array=0-1%2" in array
    assert "--gpus-per-node" not in array
    assert "#SBATCH --gpus-per-node=2" in single
    assert "#SBATCH --partition=gpu" in single
    assert slurm.handed_over == []


def test_a_job_on_an_unfit_machine_is_not_run_and_has_no_row(tmp_path: Path, scripts: Path) -> None:
    slurm = Slurm(tmp_path)
    with pytest.raises(ExecutorLost, match="1 of the trials were not run"):
        slurm.run([made_trial("a", "1 + 1"), made_trial("b", "sys.exit('it has other code')")])
    assert slurm.ended == {"a": ("ok", "2")}
    assert [said.endswith(": it has other code") for said in slurm.said] == [True]


@pytest.mark.parametrize("number", [1, 2], ids=["a job", "an array"])
def test_what_sbatch_refuses_is_told_in_its_words_and_nothing_of_it_is_left(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("FAKE_SLURM_TAKES", "0")
    slurm = Slurm(tmp_path)
    with pytest.raises(ExecutorLost, match="Slurm takes no jobs: sbatch: error: invalid partition specified: nope"):
        slurm.run([made_trial(str(each)) for each in range(number)])
    assert slurm.ended == {}
    assert slurm.handed_over == []


def test_what_was_sent_before_a_refusal_ends_first(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SLURM_TAKES", "1")
    slurm = Slurm(tmp_path)
    with pytest.raises(ExecutorLost, match="invalid partition"):
        slurm.run([made_trial("a", "time.sleep(2) or 2"), made_trial("b", devices=2, accelerator="gpu")])
    assert slurm.ended == {"a": ("ok", "2")}
    (said,) = slurm.said
    assert said.endswith("Those that it has go on.")
