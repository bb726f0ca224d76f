"""A GPU that is busy and idle in turns."""

import numpy as np
import pytest

from tests.explain.diagnosis.curves.test_swing import wave
from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.verdict_rules import utilisation_swings as check
from wellfed.explain.diagnosis.run_rules import run_rules


def watched(*, period_s=9.5, low=9, high=90, duration_s=95, copy_ms=0.0, **more):
    rng = np.random.default_rng(1)
    time_s, values, _ = wave(rng, period_s=period_s, interval_s=0.5, duration_s=duration_s, low=low, high=high)
    return evidence(curves={0: {"time_s": time_s, "util_pct": np.clip(values, 0, 100)}}, copy_ms=copy_ms, **more)


def test_from_the_utilisation_alone_its_levels_and_period_are_told():
    found = check(watched())
    assert found is not None
    assert found.evidence["period_s"] == pytest.approx(9.5, rel=0.03)
    assert "s. Nothing that was set comes as often." in found.message
    assert found.change == ()
    assert found.time_lost_frac == pytest.approx(0.45, abs=0.1)


def test_what_is_due_as_often_is_named():
    config = {"trainer": {"log_every_steps": 50, "checkpoint_minutes": 9.5 / 60}}
    found = check(watched(compute_ms=190.0, config=config))
    assert "As often comes a row of metrics.csv (trainer.log_every_steps, 9.5 s) and a checkpoint" in found.message


def test_what_waiting_explains_is_left_to_the_rule_that_says_why():
    case = watched(wait_ms=10.0, ceiling=2.0, plan={"loader.num_workers": 0, "loader.backend": "inline"})
    assert check(case) is None
    assert all(one.id != "utilisation_swings" for one in run_rules(case))


@pytest.mark.parametrize("case", [evidence(), watched(low=86, high=90), watched(host_ms=10.0), watched(duration_s=15)])
def test_even_utilisation_callbacks_and_few_readings_are_no_finding(case):
    assert check(case) is None


def test_a_run_on_the_cpu_is_not_blamed_for_a_gpu_that_others_use():
    case = watched(copy_ms=None, wait_ms=10.0, ceiling=2.0, plan={"loader.num_workers": 0, "loader.backend": "inline"})
    assert check(watched(copy_ms=None)) is None
    assert case.swings.entry() is None
