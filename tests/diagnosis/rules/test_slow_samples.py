"""Few samples that take very long."""

from __future__ import annotations

import numpy as np

from tests.diagnosis.loader_evidence import fed_by
from wellfed.diagnosis.rules.slow_samples import check

SLOW = np.isin(np.arange(200), (30, 77, 150))


def test_the_steps_that_waited_are_named():
    found = check(fed_by(4, build_ms=np.where(SLOW, 900.0, 5.0), wait_ms=np.where(SLOW, 850.0, 0.0)))
    assert "100.0 % of that in 3 steps of 200, up to 850 ms each" in found.message
    assert "Steps 31, 78, 151 have them" in found.message
    assert found.change == ()
    assert found.evidence["slow_steps"] == 3


def test_samples_that_were_left_out_are_noted():
    events = [{"kind": "sample_skipped", "step": 3, "time_s": 1.0, "index": 17, "reason": "hung"}]
    found = check(fed_by(2, build_ms=5.0, events=events))
    assert found.is_note
    assert "17" in found.message


def test_one_slow_step_and_many_are_another_matter():
    once = np.arange(200) == 30
    assert check(fed_by(4, build_ms=np.where(once, 900.0, 5.0), wait_ms=np.where(once, 850.0, 0.0))) is None
    assert check(fed_by(1, build_ms=200.0)) is None
