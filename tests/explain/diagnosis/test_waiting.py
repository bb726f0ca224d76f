"""One cause of waiting, and one rule that tells it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.evidence_of import evidence
from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import cause_of_waiting
from wellfed.explain.diagnosis.run_rules import run_rules

EVERY_8TH = np.where(np.arange(200) % 8 == 0, 64.0, 0.5)
FEW = np.where(np.arange(200) % 40 == 5, 600.0, 5.0)
COLD = np.repeat([0.0, 1.0], 100)
RUNS = {
    "loading_in_main_process": fed_by(0, build_ms=15.0),
    "too_few_workers": fed_by(1, build_ms=41.0),
    "cpu_bound_loading": fed_by(2, build_ms=40.0, wait_ms=20.0, cpu_frac=0.95, cores=2.0, cpu_pct=195.0),
    "slow_storage": fed_by(2, build_ms=80.0, iowait_pct=20.0),
    "uneven_batches": fed_by(2, build_ms=EVERY_8TH, wait_ms=EVERY_8TH / 8),
    "contended_loading": fed_by(4, build_ms=100.0, loading={"build_ms_alone": 25.0}),
}


@pytest.mark.parametrize("cause", RUNS)
def test_each_cause_is_told_by_its_rule_and_no_other(cause):
    assert cause_of_waiting(RUNS[cause]) == cause
    assert [finding.id for finding in run_rules(RUNS[cause]) if not finding.is_note] == [cause]


def test_few_slow_batches_are_random_latency_unless_samples_are_seen_to_be_slow():
    few = fed_by(4, build_ms=FEW, wait_ms=np.where(FEW > 100, 500.0, 0.0))
    assert cause_of_waiting(few) == "uneven_batches"


def test_workers_are_not_said_to_contend_where_other_programs_may_have_slowed_them():
    run = RUNS["contended_loading"]
    assert cause_of_waiting(replace(run, curves={})) == "too_few_workers"
    alone = {"build_ms_alone": 25.0}
    busy = fed_by(4, build_ms=100.0, loading=alone, cores=2.0, others_pct=180.0, cpu_pct=20.0, cpu_frac=0.05)
    assert cause_of_waiting(busy) != "contended_loading"
    waits = fed_by(4, build_ms=100.0, loading=alone, cores=2.0, others_pct=180.0, cpu_pct=20.0, cpu_frac=0.01)
    assert cause_of_waiting(waits) == "contended_loading"


def test_workers_that_are_seen_to_wait_for_a_lock_are_not_advised_to_be_more():
    """No batch was timed, as in a watched script: 4 processes read one after another."""
    watched = {"cpu_frac": None, "backend": "own", "loader_pct": 0.5}
    found = run_rules(fed_by(4, build_ms=100.0, lock_pct=300.0, **watched))[0]
    assert (found.id, found.change, found.gain) == ("contended_loading", (), None)
    assert "each waits for 75.0 % of its time for a lock" in found.message
    assert "alone" not in found.message
    for lock_pct in (80.0, None):  # they meet there at times; the system does not show it
        assert cause_of_waiting(fed_by(4, build_ms=100.0, lock_pct=lock_pct, **watched)) == "too_few_workers"
    at_work = fed_by(4, build_ms=100.0, lock_pct=200.0, cpu_frac=0.9, cores=2.0)
    assert cause_of_waiting(at_work) == "cpu_bound_loading"


def test_a_first_epoch_that_is_far_slower_to_read_is_the_disk_s():
    run = fed_by(1, build_ms=np.where(COLD == 0, 90.0, 8.0), wait_ms=np.where(COLD == 0, 80.0, 0.0), epoch=COLD)
    assert cause_of_waiting(run) == "slow_storage"


def test_lockstep_of_many_workers_is_not_single_slow_samples():
    wait_ms = np.where(np.arange(200) % 8 == 0, 120.0, 0.0)
    assert cause_of_waiting(fed_by(8, build_ms=200.0, wait_ms=wait_ms)) == "too_few_workers"


def test_whole_batches_are_advised_before_more_of_what_is_built_one_by_one():
    slow_eighth = {"build_ms": EVERY_8TH, "wait_ms": EVERY_8TH / 8}
    run = fed_by(2, **slow_eighth, cpu_frac=0.9, backend="torch", loading={"has_fetch": True})
    assert cause_of_waiting(run) == "cpu_bound_loading"


def test_where_others_have_the_cores_they_are_the_cause():
    busy = fed_by(1, build_ms=9.0, wait_ms=2.0, cpu_frac=0.6, cores=2.0, cpu_pct=60.0, others_pct=140.0)
    assert cause_of_waiting(busy) is None
    found = {finding.id: finding for finding in run_rules(busy)}
    assert found["busy_machine"].evidence["others_cores"] == pytest.approx(1.4)


@given(st.floats(0, 9.0), st.integers(1, 8), st.floats(0, 1))
def test_a_run_that_does_not_wait_has_no_cause(build_ms, workers, cpu_frac):
    assert cause_of_waiting(fed_by(workers, build_ms=build_ms, cpu_frac=cpu_frac, wait_ms=0.1)) is None


def test_without_any_figures_nothing_is_said():
    assert cause_of_waiting(evidence(time=None, throughput=None)) is None
