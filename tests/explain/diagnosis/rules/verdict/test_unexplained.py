"""Lost time for which there is no rule, and where it is said to be."""

import numpy as np

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.verdict_rules import unexplained as check


def test_waiting_without_a_cause_is_told_with_its_share():
    found = check(evidence(wait_ms=5, plan={"loader.num_workers": 2}))
    assert found is not None
    assert found.message.startswith("33.1 % of each step waits for data, and the cause of the delay is unknown")
    assert found.severity == "medium"


def test_waiting_at_the_start_of_epochs_alone_is_told_as_that():
    epochs, wait_ms = np.arange(120) // 12.0, np.zeros(120)
    wait_ms[12::12] = 60
    columns = {"epoch": epochs, "wait_ms": wait_ms}
    found = check(evidence(steps=120, wait_ms=5, ceiling=1.5, columns=columns, plan={"loader.num_workers": 2}))
    assert found is not None
    assert "nearly all of that in the first steps of each epoch" in found.message


def test_a_ceiling_out_of_reach_is_told_and_one_that_is_near_is_not():
    assert check(evidence(ceiling=1.05)) is None
    found = check(evidence(ceiling=2.0))
    assert found is not None
    assert found.message.startswith("The run reached 50.0 % of its ceiling, and no cause was recognised")
    assert found.severity == "high"


def test_a_ceiling_within_the_noise_of_the_rate_is_no_loss():
    given = evidence(ceiling=1.2)
    rate = given.record.throughput["samples_per_s"]
    given.record.throughput["ci95"] = [0.85 * rate, 1.15 * rate]
    assert check(given) is None
