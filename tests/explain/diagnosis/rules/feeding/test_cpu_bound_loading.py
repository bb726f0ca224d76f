"""Batches that take more CPU than there is."""

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import cpu_bound_loading as check


def starved(**more):
    return fed_by(2, build_ms=40.0, wait_ms=20.0, cpu_frac=0.95, cores=2.0, cpu_pct=190.0, **more)


def test_no_knob_is_named_and_the_way_out_is():
    found = check(starved())
    assert found.change == ()
    assert "building a batch takes 38 ms of CPU, a step takes 10.1 ms, and all 2 cores are full" in found.message
    assert found.severity == "high"


def test_cores_that_others_hold_are_told():
    run = fed_by(2, build_ms=60.0, wait_ms=20.0, cpu_frac=0.6, cores=2.0, cpu_pct=130.0, others_pct=60.0)
    assert "all 2 cores are full (0.6 of them with others' work)" in check(run).message


def test_whole_batches_are_asked_for_where_the_data_has_them():
    found = check(starved(backend="torch", loading={"has_fetch": True}, overrides=["loader.num_workers=2"]))
    assert found.change == ("loader.backend=auto", "loader.num_workers=null")


def test_cores_that_are_left_are_for_more_workers():
    assert check(fed_by(1, build_ms=40.0, cpu_frac=0.95, cores=8.0)) is None
