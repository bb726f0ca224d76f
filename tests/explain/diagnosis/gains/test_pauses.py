"""What pauses cost, and rounder and rarer numbers of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.gains.pauses import pauses, rarer


def test_a_phase_has_its_share_of_the_time_from_the_first_batch_to_the_last():
    phases = {"start": {"total_s": 9.0, "times": 0}, "train": {"total_s": 3.0, "times": 1}}
    phases["checkpoint"] = {"total_s": 1.0, "times": 4}
    found = pauses(evidence(phases=phases), "checkpoint")
    assert (found.total_s, found.times, found.frac) == (1.0, 4, 0.25)
    gain = found.gain(1)
    assert gain.factor == pytest.approx(1 / (1 - 0.25 * 3 / 4))
    assert gain.high == pytest.approx(4 / 3)
    assert pauses(evidence(phases=phases), "validate") is None
    assert pauses(evidence(), "checkpoint") is None


@given(st.integers(1, 10**6), st.floats(0.1, 1e4))
def test_rarer_is_round_and_far_enough(every, by):
    found = rarer(every, by)
    assert found >= 0.99 * every * max(1, by)
    assert found <= max(2.0, 2.6 * every * max(1, by))
    assert str(found).strip("0") in {"1", "2", "5"}
