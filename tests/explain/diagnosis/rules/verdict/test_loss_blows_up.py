"""A loss that leaves its median far behind, or is no number."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.verdict_rules import loss_blows_up as check


def losses(*values):
    return 10 * np.arange(1.0, len(values) + 1), np.array(values, float)


def test_a_loss_far_above_its_median_is_told_with_its_step():
    found = check(evidence(losses=losses(2, 1.9, 2.1, 1.8, 2.0, 1.9, 95, 400)))
    assert found is not None
    assert found.message.startswith("The loss rose to 95 at step 70, from a median of 1.9 before it")
    assert found.change == ("trainer.gradient_clip=1.0",)
    assert found.changes_learning


def test_with_clipping_the_learning_rate_is_lowered():
    config = {"trainer": {"gradient_clip": 1.0}, "workload": {"optimizer": {"lr": 10.0}}}
    found = check(evidence(losses=losses(2, 2, 2, 2, 2, float("inf")), config=config))
    assert found is not None
    assert found.change == ("workload.optimizer.lr=1",)
    assert "not finite at step 60" in found.message
    assert not check(evidence(losses=losses(2, 2, 2, 2, 2, 90), config={"trainer": {"gradient_clip": 1}})).change


def test_a_model_that_clips_by_itself_is_given_a_lower_rate():
    config = {"workload": {"optimizer": {"lr": 0.1}}}
    found = check(evidence(losses=losses(2, 2, 2, 2, 2, 90), config=config, refused=["trainer.gradient_clip"]))
    assert found is not None
    assert found.change == ("workload.optimizer.lr=0.01",)


def test_a_rate_far_too_high_is_lowered_where_clipping_would_not_help():
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 1e30}
    found = check(evidence(losses=losses(2, 2, 2, 2, 2, float("nan")), config={"workload": {"optimizer": optimizer}}))
    assert found is not None
    assert found.message.endswith("step 60: the learning rate of 1e+30 is far too high.")
    assert found.change == ("workload.optimizer.lr=0.01",)
    config = {"workload": {"optimizer": {**optimizer, "lr": 0.01}}}
    assert check(evidence(losses=losses(2, 2, 2, 2, 2, 90), config=config)).change == ("trainer.gradient_clip=1.0",)


def test_steps_that_were_left_out_are_counted():
    events = [{"kind": "nan", "step": step, "time_s": 1.0, **more} for step, more in ((7, {}), (9, {"left_out": 3}))]
    found = check(evidence(events=events))
    assert found is not None
    assert found.message.startswith("The loss or gradients were not finite in 5 steps, first in step 7")


def test_a_loss_that_ended_the_run_is_told_of_however_few_steps():
    found = check(evidence(steps=3, events=[{"kind": "nan", "step": 12, "time_s": 1.0, "action": "raise"}]))
    assert found is not None
    assert found.message.startswith("The loss was not finite by step 12, which ended the run")
    assert found.severity == "high"


@pytest.mark.parametrize(
    "values",
    [(), (2, 1), (5, 4, 3, 2, 1, 0.5), (1, 2, 1, 2, 1, 9), (-4, -3, -5, -4, -4, 90), (0, 0, 0, 0, 0, 5)],
)
def test_a_loss_that_falls_wavers_or_has_no_scale_is_no_finding(values):
    assert check(evidence(losses=losses(*values))) is None


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_sample_that_holds_nan_is_the_cause_and_not_the_learning_rate(action):
    nan = {"kind": "nan", "step": 9, "action": action, "sample": 417, "epoch": 0, "batch": 8, "value": "NaN"}
    found = check(evidence(events=[nan], config={"loader": {"skip_ids": [3]}}))
    assert "step 9" in found.message
    assert "training sample 417 holds NaN (epoch 0, batch 8)" in found.message
    assert "not the learning rate" in found.message
    assert found.change == ("loader.skip_ids=[3,417]",)
    assert found.changes_learning
