"""Steps that log, and are followed by a pause."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.pause_rules import frequent_logging as check


def logged(*, every=10, row_ms=30.0, also_every=None, steps=120, **more):
    """Steps of 10 ms; what a row takes shows in the step after it."""
    host_ms = np.full(steps, 0.1)
    host_ms[every::every] += row_ms
    if also_every:
        host_ms[also_every::also_every] = row_ms
    ended_s = np.cumsum(host_ms + 10) / 1e3
    config = {"trainer": {"log_every_steps": every}}
    return evidence(steps=steps, host_ms=3.0, columns={"host_ms": host_ms, "time_s": ended_s}, config=config, **more)


def test_rows_that_take_long_are_told_with_a_rarer_one():
    found = check(logged())
    assert found is not None
    assert found.message.startswith("Every 10 steps figures are logged, and the loop stands still for 30 ms then: 2")
    assert found.change == ("trainer.log_every_steps=500",)
    lost = 11 * 30 / (11 * 30 + 120 * 10.1)
    assert found.evidence["logging_frac"] == pytest.approx(lost, rel=0.05)
    assert found.gain.factor == pytest.approx(1 / (1 - lost), rel=0.06)


def test_logging_at_each_step_may_be_what_each_step_stops_for():
    found = check(logged(every=1, row_ms=5.0))
    assert found.change == ("trainer.log_every_steps=50",)
    assert found.gain.low == 1


def test_a_step_after_a_checkpoint_says_nothing_of_its_row():
    case = logged(row_ms=0.0)
    host_ms, ended_s = case.steps.column("host_ms").copy(), case.steps.column("time_s").copy()
    host_ms[20::20] = 100.0
    ended_s += np.cumsum(np.isin(np.arange(120), range(20, 120, 20)) * 0.2)
    columns = {"host_ms": host_ms, "time_s": ended_s}
    assert check(evidence(steps=120, host_ms=3.0, columns=columns, config={"trainer": {"log_every_steps": 20}})) is None


@pytest.mark.parametrize(
    "case",
    [
        logged(row_ms=1.0),
        logged(every=50, row_ms=60.0, also_every=10),
        logged(every=40),
        logged(every=1, row_ms=0.5),
        evidence(),
        evidence(config={"trainer": {"log_every_steps": 10}}),
        evidence(columns={"host_ms": np.empty(0)}, config={"trainer": {"log_every_steps": 10}}),
    ],
)
def test_short_rows_few_of_them_and_a_callback_that_comes_more_often_are_no_finding(case):
    assert check(case) is None


def test_a_few_steps_that_something_else_held_up_are_no_finding():
    case = logged(row_ms=0.0)
    host_ms = case.steps.column("host_ms").copy()
    host_ms[[10, 50]] = 300.0
    ended_s = np.cumsum(host_ms + 10) / 1e3
    columns = {"host_ms": host_ms, "time_s": ended_s}
    assert check(evidence(steps=120, host_ms=5.0, columns=columns, config={"trainer": {"log_every_steps": 10}})) is None
