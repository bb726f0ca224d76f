"""Epochs whose first batch comes late, since their workers are new."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.feeding_rules import restarted_workers as check

PLAN = {"loader.backend": "processes", "loader.num_workers": 4, "loader.persistent_workers": False}


def epochs(*, late_ms=200.0, gap_ms=0.0, length=20, steps=120, plan=None, **more):
    """Steps of 10 ms; the first of each epoch waits, and comes after a gap."""
    epoch = np.arange(steps) // length
    first = np.diff(epoch, prepend=0) > 0
    wait_ms = np.where(first, late_ms, 0.0)
    ended_ms = np.cumsum(wait_ms + 10.1 + np.where(first, gap_ms, 0.0))
    columns = {"epoch": epoch, "wait_ms": wait_ms, "time_s": ended_ms / 1e3}
    return evidence(steps=steps, columns=columns, plan=PLAN | (plan or {}), **more)


def test_new_workers_of_each_epoch_are_told_with_what_keeps_them():
    found = check(epochs())
    assert found is not None
    assert "its first step comes 200 ms late" in found.message
    assert "5 starts of 20 steps" in found.message
    assert found.change == ("loader.persistent_workers=true",)
    lost = 5 * 200 / (5 * 200 + 120 * 10.1)
    assert found.evidence["restart_frac"] == pytest.approx(lost, rel=0.02)
    assert found.gain.low < found.gain.factor < found.gain.high == pytest.approx(1 / (1 - lost), rel=0.03)


def test_a_loader_of_the_user_s_that_no_knob_changes_is_told_in_words():
    found = check(epochs(plan={"loader.backend": "own"}))
    assert found.change == ("loader.persistent_workers=true",)
    assert "what a hook changes between epochs is lost on them" in found.message
    assert "hook" not in check(epochs()).message  # workers of the engine's are started anew after a change
    found = check(epochs(plan={"loader.backend": "own"}, refused=["loader.num_workers"]))
    assert found.change == ()
    assert "persistent_workers=True" in found.advice


@pytest.mark.parametrize(
    "case",
    [
        epochs(plan={"loader.persistent_workers": True}),
        epochs(plan={"loader.num_workers": 0}),
        epochs(plan={"loader.backend": "threads"}),
        epochs(late_ms=5.0),
        epochs(length=50),
        evidence(plan=PLAN),
        evidence(plan=PLAN, wait_ms=20.0),
    ],
)
def test_workers_that_live_on_few_epochs_and_even_waiting_are_no_finding(case):
    assert check(case) is None
