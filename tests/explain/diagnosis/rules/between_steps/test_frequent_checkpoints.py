"""Checkpoints that take a good part of a run."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis.rules.pause_rules import frequent_checkpoints as check


def saved(*, files=("last.ckpt",) * 8, each_s=0.15, every=25, minutes=10, epoch_steps=1000, **more):
    """A run of two seconds of steps."""
    times = len(files)
    phases = {"train": {"total_s": 2.0, "times": 1}, "checkpoint": {"total_s": each_s * times, "times": times}}
    events = [{"kind": "checkpoint", "step": 25, "time_s": 1.0, "file": file} for file in files]
    columns = {"epoch": np.arange(200) // epoch_steps}
    config = {"trainer": {"checkpoint_every_steps": every, "checkpoint_minutes": minutes}}
    return evidence(steps=200, phases=phases, events=events, config=config, columns=columns, **more)


def test_their_share_of_the_run_is_told_with_a_rarer_one():
    found = check(saved())
    assert found is not None
    assert found.message.startswith("37.5 % of the wall time of training went into 8 checkpoints of 150 ms, ")
    assert "one every 25 steps" in found.message
    assert found.change == ("trainer.checkpoint_every_steps=200",), "not rarer than the run is long"
    assert found.gain.factor == pytest.approx(1 / (1 - 0.375 * 7 / 8))
    assert not found.changes_learning


def test_one_at_each_epoch_is_told_as_such():
    found = check(saved(every=None, epoch_steps=20))
    assert "one at the end of each epoch" in found.message
    assert found.change == ("trainer.checkpoint_every_steps=200",)


def test_those_of_a_script_are_at_epochs_only_if_there_are_about_as_many():
    found = check(saved(files=("torch.save",) * 4, each_s=0.5, every=None, epoch_steps=20))
    assert "epoch" not in found.message
    assert found.change == ()
    assert found.time_lost_frac == pytest.approx(0.5)
    with_best = check(saved(files=("best.ckpt", "last.ckpt") * 10, every=None, epoch_steps=20))
    assert ", last.ckpt at the end of each epoch." in with_best.message


def test_a_few_long_ones_are_told():
    found = check(saved(files=("last.ckpt",) * 4, each_s=60.0, every=50))
    assert found.message.startswith("99.2 % of the wall time of training went into 4 checkpoints of 1 min 00 s")
    assert found.change == ("trainer.checkpoint_every_steps=200",)


@pytest.mark.parametrize(("every", "epoch_steps"), [(150, 1000), (None, 60), (None, 1000)])
def test_those_that_come_by_the_minutes_are_told_as_such(every, epoch_steps):
    """Eight of them in 200 steps are neither one every 150 nor one at each end of an epoch."""
    run = saved(each_s=60.0, every=every, epoch_steps=epoch_steps, minutes=2)
    run.record.phases["train"]["total_s"] = 920.0
    found = check(run)
    assert found.message.startswith(
        "34.3 % of the wall time of training went into 8 checkpoints of 1 min 00 s, one every 2 min."
    )
    assert found.change == ("trainer.checkpoint_minutes=24",), "not rarer than the run is long"
    assert found.gain.factor == pytest.approx(1 / (1 - 0.343 * (1 - (200 / 150 if every else 1) / 8)), rel=0.05)


def test_the_gain_of_a_long_run_has_no_share_for_start_and_end():
    """A run of 3 s of steps and 2 s of checkpoints starts and ends in 5 s."""
    run = saved(each_s=0.25, wall=walled(steps_s=3.0, checkpoint_s=2.0, start_s=4.0, end_s=1.0))
    found = check(run)
    assert found.gain.factor == pytest.approx(1 / (1 - 0.2 * 7 / 8))
    assert found.gain.high == pytest.approx(5 / 3)


def test_those_of_a_validation_that_was_the_best_stay():
    found = check(saved(files=("best.ckpt",) * 8))
    assert found.change == ()
    assert found.gain is None
    assert found.time_lost_frac == pytest.approx(0.375)
    mixed = check(saved(files=("best.ckpt",) * 3 + ("last.ckpt",) * 5))
    assert mixed.gain.factor < 1.25
    assert "8 checkpoints" in mixed.message
    assert ", last.ckpt every 25 steps." in mixed.message


@pytest.mark.parametrize("case", [saved(each_s=0.01), evidence(), saved(files=())])
def test_quick_or_untimed_ones_are_no_finding(case):
    assert check(case) is None
