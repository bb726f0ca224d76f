"""Likely faults, planted in real runs: each run's claims are compared with what is on the disk."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_cuda.marker import simulated_machine
from tests.faults.harness import Box, Expected, judge
from wellfed.record.entries import FILE_NAME

Plant = Callable[[Box], object]
"""Runs the training of a box with a fault in it; the box's latest command is judged."""
KEEPS_TWO = ("trainer.checkpoint_every_steps=6", "trainer.keep_last=2")
WORKERS = ("loader.backend=processes", "loader.num_workers=2", "trainer.checkpoint_every_steps=6")
RANKS = ("trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu", "trainer.checkpoint_every_steps=6")
FAILED = Expected()
STOPPED = Expected((143,), ("interrupted",))
OOM = Expected((3,), ("oom",))
COMPLETED = Expected((0,), ("ok",))
KILLED = Expected((-9,), ("killed",), keeps=6)


def trained(plant: str, *overrides: str, **variables: str) -> Plant:
    """Returns one training with this plant; `planted.planted` reads it."""
    return lambda box: box.train(*overrides, plant=plant, **variables)


def on_full_disk(plant: str) -> Plant:
    """Returns one training whose output goes through pipes, not to a file on the full disk."""
    return lambda box: box.train(plant=plant, around='exec "$@"')


def on_card(box: Box) -> None:
    """Runs out of memory in one step on a simulated card."""
    variables = simulated_machine().environment(mib=512)
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(box.folder)])
    box.train("memory.on_oom=retry", plant="loss:12:oom", **variables)


def damaged(name: str) -> Plant:
    """Returns a run killed at step 20, with checkpoints of steps 12 and 18, whose file is cut before it is resumed."""

    def plant(box: Box) -> None:
        box.train(*KEEPS_TWO, plant="step:20:sigkill")
        content = (box.run / name).read_bytes()
        (box.run / name).write_bytes(content[: len(content) // 2])
        box.train("resume=auto", is_resumed=True)

    return plant


FAULTS: dict[str, tuple[Plant, Expected]] = {
    "SIGTERM in a step": (trained("loss:12:sigterm"), STOPPED),
    "SIGTERM with workers": (trained("loss:12:sigterm", *WORKERS), STOPPED),
    "SIGKILL while saving": (trained("save:2:sigkill", *KEEPS_TWO), KILLED),
    "SIGKILL before a checkpoint is renamed": (trained("rename_last.ckpt:2:sigkill", *KEEPS_TWO), KILLED),
    "disk full from step 12 on": (
        on_full_disk("step:12:full"),
        Expected((1,), ("failed", "killed"), "last saved step 8 of 24", resumes=False),
    ),
    "disk full at one save, then free": (on_full_disk("save:1:full; step:12:room"), COMPLETED),
    "MemoryError in a step": (trained("step:12:memory"), OOM),
    "the card's memory ends in one step": (on_card, COMPLETED),
    "a worker killed": (trained("train_sample:40!:worker_sigkill", *WORKERS), FAILED),
    "a sample that raises in a worker": (trained("train_sample:40!:raise", *WORKERS), Expected(says="sample 40")),
    "NaN in one sample": (trained("train_sample:40!:nan"), Expected(says="sample 40")),
    "a step that raises": (trained("loss:12:raise"), FAILED),
    "last.ckpt cut": (damaged("checkpoints/last.ckpt"), COMPLETED),
    "run.json cut": (damaged(FILE_NAME), Expected((2,), ("",), "is damaged", resumes=False)),
    "two ranks: one is killed in a step": (
        trained("loss:12:rank1_sigkill", *RANKS),
        Expected((1, -9, -15), ("failed", "killed")),
    ),
    "two ranks: the first is killed": (
        trained("loss:12:rank0_sigkill", *RANKS),
        Expected((-9,), ("failed", "killed")),
    ),
    "two ranks: a step raises on one": (
        trained("loss:12:rank1_raise", *RANKS),
        Expected((1,), ("failed",), "planted failure"),
    ),
    "two ranks: an evaluation raises on one": (
        trained("evaluate:5:rank1_raise", *RANKS),
        Expected((1,), ("failed",), "planted failure"),
    ),
    "two ranks: SIGTERM": (trained("loss:12:rank0_sigterm", *RANKS), STOPPED),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_is_right_about_itself_after_a_fault(tmp_path: Path, fault: str) -> None:
    plant, expected = FAULTS[fault]
    box = Box(tmp_path)
    plant(box)
    case = judge(box, fault, expected)
    assert not case.faults, case
