"""Batches that the training process builds itself."""

import pytest

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import loading_in_main_process as check


def test_workers_that_the_steps_need_are_told():
    found = check(fed_by(0, build_ms=15.0, step_ms=9.9))
    assert "60.0 % of each step waits for data" in found.message
    assert (
        "builds a batch itself in 15 ms, and a step takes 10 ms; 2 workers are needed and one to spare" in found.message
    )
    assert found.change == ("loader.backend=auto", "loader.num_workers=3")
    assert found.gain.factor == pytest.approx(2.5)


def test_knobs_that_stand_against_workers_are_turned_too():
    found = check(fed_by(0, build_ms=15.0, loader={"backend": "torch", "persistent_workers": False}))
    assert found.change == ("loader.backend=auto", "loader.num_workers=3", "loader.persistent_workers=true")


def test_whole_batches_that_nobody_asks_for_come_before_workers():
    baseline = {"backend": "torch", "persistent_workers": False}
    slow = {"build_ms": 150.0, "cpu_frac": 0.98, "loader": baseline, "loading": {"has_fetch": True}}
    assert check(fed_by(0, **slow, overrides=["experiment=recsys_starved"])).change == ("loader=auto",)
    found = check(fed_by(0, **slow, overrides=["loader=auto", "loader.backend=torch", "loader.num_workers=0"]))
    assert "fetch" in found.message
    assert found.change == ("loader.backend=auto", "loader.num_workers=null", "loader.persistent_workers=null")
    assert found.gain.factor == pytest.approx(16, rel=0.05)


@pytest.mark.parametrize("run", [fed_by(0, build_ms=0.3), fed_by(1, build_ms=40.0), fed_by(0, build_ms=15.0, steps=9)])
def test_short_builds_workers_and_few_steps_are_no_finding(run):
    assert check(run) is None


def test_a_core_that_is_full_already_can_t_be_shared_with_a_worker():
    assert check(fed_by(0, build_ms=15.0, cpu_frac=1.0, cores=1.0)) is None
