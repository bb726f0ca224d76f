"""Validations that take a good part of a run."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis.rules.pause_rules import frequent_validation as check


def validated(*, times=10, each_s=0.2, every=20, epoch_steps=1000, config=None, **more):
    phases = {"train": {"total_s": 2.0, "times": 1}, "validate": {"total_s": each_s * times, "times": times}}
    columns = {"epoch": np.arange(200) // epoch_steps}
    config = {"trainer": {"validate_every_steps": every}, **(config or {})}
    return evidence(steps=200, phases=phases, config=config, columns=columns, **more)


def test_their_share_of_the_run_is_told_with_a_rarer_one():
    found = check(validated())
    assert found is not None
    assert found.message.startswith(
        "50.0 % of the wall time of training went into 10 validations of 200 ms, one every 20 steps"
    )
    assert found.change == ("trainer.validate_every_steps=200",), "not rarer than the run is long"
    assert found.gain.factor == pytest.approx(1 / (1 - 0.5 * 0.9))
    assert not found.changes_learning


def test_one_at_each_epoch_is_told_as_such():
    found = check(validated(every=None, epoch_steps=20))
    assert "one at the end of each epoch" in found.message
    assert found.change == ("trainer.validate_every_steps=200",)


def test_those_of_a_script_are_at_epochs_only_if_there_are_about_as_many():
    for times in (3, 40):
        found = check(validated(every=None, epoch_steps=20, times=times, each_s=2.0 / times))
        assert "epoch" not in found.message
        assert found.change == ()
    own = check(validated(every=None, epoch_steps=20, times=3, wall=walled(steps_s=3.0, validation_s=1.0)))
    assert "one at the end of each epoch" in own.message, "a resumed run, of which this process trained a part"


def test_the_only_validation_of_a_run_is_told_however_few_there_were():
    found = check(validated(times=1, each_s=38.0, every=200))
    assert found.message.startswith("95.0 % of the wall time of training went into 1 validation of 38.0 s.")
    assert "smaller split" in found.advice
    assert found.change == ()
    assert found.time_lost_frac == pytest.approx(0.95)


def test_what_was_measured_counts_and_not_the_phases():
    wall = walled(steps_s=3.0, validation_s=1.0)
    assert check(validated(wall=wall)).evidence["validation_frac"] == pytest.approx(0.25)
    assert check(validated(wall=walled(steps_s=3.0, validation_s=0.1))) is None


@pytest.mark.parametrize(
    "more",
    [{"config": {"workload": {"schedule": {"monitor": "val/loss"}}}}, {"plan": {"callbacks": "ema, early_stopping"}}],
)
def test_what_goes_by_validations_learns_otherwise_with_fewer(more):
    assert check(validated(**more)).changes_learning


@pytest.mark.parametrize("case", [validated(each_s=0.04), validated(times=0), evidence()])
def test_quick_or_untimed_ones_are_no_finding(case):
    assert check(case) is None
