"""A ceiling that the waiting does not bear out is no gain that can be promised."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.evidence_of import walled
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.record.entries import RunRecord


def record(
    rate: float, ceiling: float, wait: float, *, copy: float | None = None, host: float = 0.02, noise: float = 0.03
) -> RunRecord:
    compute = max(0.0, 1 - wait - (copy or 0) - host)
    return RunRecord(
        "r",
        throughput={
            "samples_per_s": rate,
            "ci95": [rate * (1 - noise), rate * (1 + noise)],
            "steps": 200,
            "warmup_steps": 3,
            "sample_unit": "samples",
        },
        ceiling={"samples_per_s": ceiling},
        time={
            "wait_frac": wait,
            "copy_frac": copy,
            "compute_frac": compute,
            "host_frac": host,
            "step_ms_p50": 1.0,
            "step_ms_p95": 2.0,
        },
    )


@pytest.mark.parametrize(
    ("given_record", "slower"),
    [
        (record(512, 1000, 0.008), "steps"),  # as on a busy machine
        (record(512, 1000, 0.008, host=0.4), "steps"),
        (record(500, 1000, 0.5), None),
        (record(500, 1000, 0.3, copy=0.2), None),
        (record(100, 1400, 0.9), None),  # starved; and cold steps are slower than warm ones
        (record(100, 1000, 0.9), None),
        (record(4601, 126_273, 0.855), None),  # workers that take the CPU from the steps: nearly all is still the wait
        (record(950, 1000, 0.01), None),
        (record(1000, 900, 0.04), None),
        (record(1000, 1000, 0.5), "ceiling"),
        (record(1000, 700, 0.04), None),  # whichever was slower: data cost next to nothing
        (record(800, 1000, 0.01, noise=0.2), None),  # the rate is too uncertain to tell
    ],
)
def test_what_was_slower_than_the_rest_lets_expect(given_record: RunRecord, slower: str | None) -> None:
    found = contradiction(given_record)
    assert (found and found.slower) == slower


@pytest.mark.parametrize("hook", ["Own.on_train_batch_start", "Own.on_before_optimizer_step", "OneCycleLR.step"])
def test_callbacks_within_the_steps_explain_a_ceiling_without_them(hook: str) -> None:
    measured = replace(record(512, 1000, 0.008), wall=walled(steps_s=5.0, callbacks={hook: 5.0}))
    assert contradiction(measured) is None
    assert contradiction(replace(measured, wall=walled(steps_s=9.0, callbacks={hook: 1.0}))) is not None
    between = {"Own.on_train_epoch_end": 5.0}
    assert contradiction(replace(measured, wall=walled(steps_s=5.0, callbacks=between))) is not None


@pytest.mark.parametrize("lost", ["throughput", "ceiling", "time"])
def test_what_was_not_measured_contradicts_nothing(lost: str) -> None:
    assert contradiction(replace(record(512, 1000, 0.008), **{lost: None})) is None
    assert contradiction(RunRecord("r")) is None


@given(st.floats(1e-3, 1e6), st.floats(0, 0.95), st.floats(0.96, 1.04))
def test_a_ceiling_that_the_waiting_explains_contradicts_nothing(rate: float, wait: float, noise: float) -> None:
    assert contradiction(record(rate, noise * rate / (1 - wait), wait, host=0.0)) is None
