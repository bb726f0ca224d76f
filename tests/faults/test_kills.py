"""Kills a few trainings once each, and checks that the comparison notices everything that a resume may lose."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.harness import STEPS
from tests.faults.kills import BATCH, LIMIT_S, SAMPLES, Training, differences, tried, undisturbed


def completed(folder: Path, kind: str = "one process") -> Training:
    """Returns a training whose folder is like that of an undisturbed one."""
    training = Training(folder, kind)
    run = folder / "logs" / "planted" / "runs" / "2026-01-01_00-00-00_beef"
    (run / "checkpoints").mkdir(parents=True)
    (run / "wandb" / "offline-run-20260101_000000-abc").mkdir(parents=True)
    torch.save({"state_dict": {"weight": torch.ones(3), "steps": torch.tensor(STEPS)}}, training.box.last)
    (run / "run.json").write_text(json.dumps({"status": "ok", "wandb": {"id": "abc"}}))
    (run / "steps.csv").write_text("step,samples\n" + "".join(f"{step},{BATCH}\n" for step in range(1, STEPS + 1)))
    rows = "4,train,loss,0.5\n4,throughput,samples_per_s,9\n8,val,loss,0.4\n24,test,loss,0.3\n"
    (run / "metrics.csv").write_text(f"step,split,name,value\n{rows}")
    with (folder / "samples-0").open("w") as file:
        for step in range(1, STEPS + 1):
            first = BATCH * (step - 1) % SAMPLES
            print(1, step, *range(first, first + BATCH), file=file)
    return training


def saved(training: Training, **weights: torch.Tensor) -> None:
    torch.save({"state_dict": weights}, training.box.last)


def appended(name: str, text: str) -> Callable[[Training], object]:
    def change(training: Training) -> None:
        with (training.box.run / name).open("a") as file:
            file.write(text)

    return change


def noted(text: str) -> Callable[[Training], object]:
    """Returns a change that adds lines to the file of samples of the first rank."""

    def change(training: Training) -> None:
        with (training.box.folder / "samples-0").open("a") as file:
            file.write(text)

    return change


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda it: saved(it, weight=torch.ones(3) + 1e-7, steps=torch.tensor(STEPS)), "the last weights differ"),
        (lambda it: saved(it, weight=torch.ones(3), steps=torch.tensor(STEPS - 1)), "the last weights differ"),
        (appended("steps.csv", "24,8\n"), "steps.csv has 25 rows"),
        (appended("metrics.csv", "8,val,loss,0.4\n"), "rows twice: [('8', 'val', 'loss')]"),
        (lambda it: (it.box.run / "wandb" / "offline-run-20260101_000001-xyz").mkdir(), "several runs: ['abc', 'xyz']"),
        (noted("2 3 16 17 18 19 20 21 22 24\n"), "once in the epoch of step 1: [23, 24]"),
    ],
)
def test_what_a_resume_may_lose_is_noticed(tmp_path: Path, change: Callable[[Training], object], noticed: str) -> None:
    whole, training = completed(tmp_path / "whole"), completed(tmp_path / "killed")
    assert not list(differences(whole, training))
    change(training)
    (found,) = differences(whole, training)
    assert noticed in found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no callbacks", "a stream", "four ranks", "a card, out of memory"])
def test_a_training_that_is_killed_once_ends_as_if_undisturbed(tmp_path: Path, kind: str) -> None:
    """The resume is the fifth: in a restarted container."""
    whole, took_s = undisturbed(kind, tmp_path / "whole")
    trial = tried(kind, tmp_path / "killed", whole, [0.8 * took_s], resumes=4)
    assert not trial.faults, trial


KILLED_IN = {
    # Its validation is done, its last checkpoint is written.
    "the test": ("one process", "test:1:sigkill"),
    # The second one. Two batches are those of the check before training, two of the first.
    "a validation": ("no callbacks", "evaluate:5:sigkill"),
    # The first one is written, the record not yet.
    "a checkpoint": ("one process", "save:1:room; rename_run.json:*:then_sigkill"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLED_IN)
def test_nothing_is_lost_or_listed_twice(tmp_path: Path, moment: str) -> None:
    kind, plant = KILLED_IN[moment]
    whole, _ = undisturbed(kind, tmp_path / "whole")
    training = Training(tmp_path / "killed", kind)
    assert training.run(LIMIT_S, plant=plant) == -signal.SIGKILL
    assert training.has_checkpoint
    assert training.run(LIMIT_S) == 0
    assert not list(differences(whole, training))


@pytest.mark.slow
def test_rows_are_on_disk_before_a_checkpoint(tmp_path: Path) -> None:
    """A run that resumes from it does not write them again."""
    training = Training(tmp_path, "one process")
    assert training.run(LIMIT_S, plant="save:1:sigkill") == -signal.SIGKILL
    assert [step for step, _ in training.steps()] == list("123456")
