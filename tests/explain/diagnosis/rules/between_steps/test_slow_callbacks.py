"""Time that passes between two steps."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis.rules.between_steps.slow_callbacks import check


def paused(places, ms, *, steps=120, log_every=50):
    host_ms = np.full(steps, 0.1)
    host_ms[places] += ms
    columns = {"host_ms": host_ms, "time_s": np.cumsum(host_ms + 10) / 1e3}
    mean = float(host_ms.mean())
    return evidence(steps=steps, host_ms=mean, columns=columns, config={"trainer": {"log_every_steps": log_every}})


def test_a_pause_behind_each_step_is_told_with_the_callbacks_that_there_are():
    found = check(evidence(host_ms=6.0, plan={"callbacks": "ema, lr_monitor"}))
    assert found is not None
    assert found.message.startswith(
        "Between two steps 6 ms pass before the next begins, 37.5 % of the time: callbacks ("
    )
    assert "ema, lr_monitor" in found.message
    assert found.change == ()
    assert found.time_lost_frac == pytest.approx(0.375)


def test_the_class_and_the_hook_are_named_with_their_share():
    wall = walled(steps_s=4.0, callbacks={"Own.on_train_epoch_end": 5.5, "Ema.on_train_batch_end": 0.5})
    found = check(evidence(host_ms=6.0, wall=wall))
    assert found.message == "Own.on_train_epoch_end takes 55.0 % of the wall time of training, 5.5 s of 10.0 s."
    assert found.time_lost_frac == pytest.approx(0.6)


def test_several_that_take_as_long_are_named_with_their_own_shares():
    wall = walled(steps_s=5.0, callbacks={"A.on_fit_start": 3.0, "B.on_train_start": 2.0, "C.setup": 0.01})
    said = "A.on_fit_start 30.0 %, B.on_train_start 20.0 %: callbacks and hooks take 50.0 % of the wall time"
    assert check(evidence(wall=wall)).message.startswith(said)


def test_callbacks_that_were_measured_to_take_nothing_are_not_blamed_for_a_slow_loop():
    assert check(evidence(host_ms=6.0, wall=walled(steps_s=10.0, callbacks={"Ema.on_train_batch_end": 0.1}))) is None


def test_a_card_may_compute_beside_callbacks_within_the_steps():
    waits_for_it = walled(steps_s=6.0, callbacks={"A.on_train_batch_end": 4.0})
    assert check(evidence(copy_ms=0.1, ceiling=1.01, wall=waits_for_it)) is None
    assert check(evidence(copy_ms=0.1, ceiling=1.25, wall=waits_for_it)).time_lost_frac == pytest.approx(0.2)
    wall = walled(steps_s=5.0, callbacks={"A.on_train_batch_end": 4.0, "B.on_train_epoch_end": 1.0})
    assert check(evidence(copy_ms=0.1, ceiling=1.0, wall=wall)).time_lost_frac == pytest.approx(0.1)


def test_one_behind_every_tenth_step_is_told_with_how_often_it_comes():
    found = check(paused(slice(10, None, 10), 60.0))
    assert found.message.startswith("Every 10 steps 60 ms pass")
    assert found.evidence["every_steps"] == 10


def test_short_pauses_of_the_machine_s_in_between_hide_it_not():
    case = paused(slice(10, None, 10), 60.0)
    host_ms = case.steps.column("host_ms").copy()
    host_ms[[3, 26, 44, 57, 59, 96]] += 4.0
    columns = {"host_ms": host_ms, "time_s": np.cumsum(host_ms + 10) / 1e3}
    assert check(evidence(steps=120, host_ms=5.0, columns=columns)).evidence["every_steps"] == 10


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
    assert check(case) is None
