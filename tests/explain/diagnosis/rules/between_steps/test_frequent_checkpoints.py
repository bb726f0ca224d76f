"""Checkpoints that take a good part of a run."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.pause_rules import frequent_checkpoints as check


def saved(*, files=("last.ckpt",) * 8, each_s=0.15, every=25, epoch_steps=1000, **more):
    """A run of two seconds of steps."""
    times = len(files)
    phases = {"train": {"total_s": 2.0, "times": 1}, "checkpoint": {"total_s": each_s * times, "times": times}}
    events = [{"kind": "checkpoint", "step": 25, "time_s": 1.0, "file": file} for file in files]
    columns = {"epoch": np.arange(200) // epoch_steps}
    config = {"trainer": {"checkpoint_every_steps": every}}
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
