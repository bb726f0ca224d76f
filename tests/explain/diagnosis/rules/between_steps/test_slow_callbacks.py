"""Time that passes between two steps."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis.rules.pause_rules import check_between_steps
from wellfed.explain.diagnosis.rules.pause_rules import slow_callbacks as check


def paused(places, ms, *, steps=120, log_every=50):
    host_ms = np.full(steps, 0.1)
    host_ms[places] += ms
    columns = {"host_ms": host_ms, "time_s": np.cumsum(host_ms + 10) / 1e3}
    mean = float(host_ms.mean())
    return evidence(steps=steps, host_ms=mean, columns=columns, config={"trainer": {"log_every_steps": log_every}})


def test_a_pause_behind_each_step_is_told_with_the_callbacks_that_there_are():
    found = check_between_steps(evidence(host_ms=6.0, plan={"callbacks": "ema, lr_monitor"}))
    assert found is not None
    assert "ema, lr_monitor" in found.message
    assert found.change == ()
    assert found.time_lost_frac == pytest.approx(0.375)


def test_the_class_and_the_hook_are_named_with_their_share():
    wall = walled(steps_s=4.0, callbacks={"Own.on_train_epoch_end": 5.5, "Ema.on_train_batch_end": 0.5})
    found = check(evidence(host_ms=6.0, wall=wall))
    assert found.evidence["callback"] == "Own.on_train_epoch_end"
    assert found.evidence["callback_s"] == 5.5
    assert found.time_lost_frac == pytest.approx(0.6)


def test_callbacks_that_were_measured_to_take_nothing_are_not_blamed_for_a_slow_loop():
    case = evidence(host_ms=6.0, wall=walled(steps_s=10.0, callbacks={"Ema.on_train_batch_end": 0.1}))
    assert check(case) is None
    assert check_between_steps(case) is None


def test_a_card_may_compute_beside_callbacks_within_the_steps():
    waits_for_it = walled(steps_s=6.0, callbacks={"A.on_train_batch_end": 4.0})
    assert check(evidence(copy_ms=0.1, ceiling=1.01, wall=waits_for_it)) is None
    assert check(evidence(copy_ms=0.1, ceiling=1.25, wall=waits_for_it)).time_lost_frac == pytest.approx(0.2)
    wall = walled(steps_s=5.0, callbacks={"A.on_train_batch_end": 4.0, "B.on_train_epoch_end": 1.0})
    assert check(evidence(copy_ms=0.1, ceiling=1.0, wall=wall)).time_lost_frac == pytest.approx(0.1)


def test_a_hook_that_waits_for_the_card_costs_what_the_card_stands_still_between_steps():
    """Without a ceiling. It reads the loss, so the host waits until the card has computed the step."""
    wall = walled(steps_s=2.0, callbacks={"PrintLoss.on_train_batch_end": 8.0})
    assert check(evidence(copy_ms=0.1, compute_ms=10.0, host_ms=0.2, wall=wall)) is None
    found = check(evidence(copy_ms=0.0, compute_ms=6.0, host_ms=4.0, wall=wall))
    assert found.time_lost_frac == pytest.approx(0.4)
    assert check(evidence(compute_ms=10.0, host_ms=0.2, wall=wall)).time_lost_frac == pytest.approx(0.8)  # on a CPU


def test_one_behind_every_tenth_step_is_told_with_how_often_it_comes():
    found = check_between_steps(paused(slice(10, None, 10), 60.0))
    assert found.evidence["every_steps"] == 10


@pytest.mark.parametrize(
    "case",
    [
        evidence(),
        evidence(host_ms=0.4, compute_ms=1.0),
        paused([3, 4, 17, 40, 44, 90, 91, 110], 60.0),
        paused([10, 20], 300.0),
        paused(slice(10, None, 10), 60.0, log_every=10),
        paused(slice(10, None, 10), 4.0),
    ],
)
def test_short_or_disorderly_pauses_and_those_of_logging_are_no_finding(case):
    assert check_between_steps(case) is None
