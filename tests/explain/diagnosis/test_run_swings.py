"""Swings as sentences."""

import numpy as np

from tests.explain.diagnosis.curves.test_swing import loader, wave
from tests.kit.evidence_of import evidence


def lockstep():
    wait_ms, rest_ms = loader(np.random.default_rng(9), workers=4, build_ms=100, step_ms=8)
    columns = {"wait_ms": wait_ms, "compute_ms": rest_ms, "time_s": np.cumsum(wait_ms + rest_ms + 0.1) / 1e3}
    return evidence(steps=240, columns=columns, plan={"loader.num_workers": 4})


def test_workers_in_lockstep_are_told_with_their_period():
    said = lockstep().swings.describe_workers()
    assert said is not None
    assert said.startswith("Every 4 steps (10")
    assert said.endswith(
        "a step waits longer for its batch, since the workers finish their batches at about the same time."
    )
    assert evidence().swings.describe_workers() is None


def test_the_gpu_that_swings_most_is_told():
    rng = np.random.default_rng(3)
    curves = {}
    for gpu, low in ((0, 50), (1, 5)):
        time_s, values, _ = wave(rng, period_s=9.5, interval_s=0.5, duration_s=95, low=low)
        curves[gpu] = {"time_s": time_s, "util_pct": values}
    said = evidence(curves=curves, copy_ms=0.0).swings.describe_utilisation()
    assert said.startswith("The utilisation of GPU 1 swings between ")
    assert said.endswith(" s, as does 1 other GPU.")
    assert evidence(copy_ms=0.0).swings.describe_utilisation() is None


def test_what_is_due_as_often_is_within_a_tenth():
    case = evidence(compute_ms=99.9, config={"trainer": {"log_every_steps": 50, "validate_every_steps": 70}})
    assert case.swings.settings_with_period(5.2) == ["a row of metrics.csv (trainer.log_every_steps, 5.0 s)"]
    assert case.swings.settings_with_period(6.0) == []
