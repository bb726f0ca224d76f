"""The time of a step that other workers feed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.gains.feeding import feeding_of, is_starved, knobs
from wellfed.explain.diagnosis.rules.feeding_rules import cause_of_waiting

TIMES = st.floats(0.5, 500)


def test_a_step_is_as_long_as_the_slowest_of_step_building_and_cores():
    waits = feeding_of(fed_by(1, build_ms=41.0, step_ms=11.9))
    assert waits.workers_needed == 4
    assert waits.work.period_ms(2) == pytest.approx(20.5)
    assert waits.work.period_ms(8) == pytest.approx(12.0)
    works = feeding_of(fed_by(1, build_ms=41.0, step_ms=11.9, cpu_frac=1.0, cores=2.0, on_gpu=True))
    assert works.work.period_ms(8) == pytest.approx((41.0 + 12.0) / 2)
    assert works.workers_needed == works.workers_advised == 2


def test_cores_that_others_take_are_not_free():
    alone = feeding_of(fed_by(1, build_ms=40.0, cpu_frac=1.0, cores=4.0))
    beside = feeding_of(fed_by(1, build_ms=40.0, cpu_frac=1.0, cores=4.0, others_pct=200.0))
    assert beside.work.period_ms(4) > alone.work.period_ms(4)


def ranked(**given):
    """Rank 0 of two that torchrun started; each keeps two of the eight cores busy."""
    rank = {"node": 0, "host": "a", "wait_frac": 0.5, "cores": 2.0}
    launch = {"by": "torchrun", "job": None, "attempt": 0}
    more = {"launch": launch, "ranks": [{**rank, "rank": number} for number in (0, 1)], "plan": {"trainer.devices": 2}}
    return feeding_of(fed_by(1, build_ms=40.0, cpu_frac=1.0, cpu_pct=200.0, others_pct=200.0, **more, **given))


def test_batches_of_all_ranks_must_fit_into_memory():
    loading = {"batch_mib": 100.0}
    machine = {"cpu_quota_cores": 8.0, "shm_gib": 1.0}
    alone = feeding_of(fed_by(1, build_ms=40.0, loading=loading, machine=machine))
    assert ranked(loading=loading, machine=machine).most_workers == alone.most_workers // 2


def test_without_build_times_they_are_concluded_from_the_waiting():
    found = feeding_of(fed_by(2, build_ms=50.0, cpu_frac=None))
    assert found.is_estimate
    assert found.build_ms == pytest.approx(50.0)
    assert found.figures()["_about"] == "about "


def test_workers_whose_batches_were_not_timed_are_judged_by_the_cpu_that_they_took():
    """As in a watched script. The step itself may have needed little of a core."""
    few_cores = fed_by(8, build_ms=385.0, step_ms=30.0, cpu_frac=None, cores=2.0, cpu_pct=195.0, loader_pct=190.0)
    assert not feeding_of(few_cores).waits_outside
    assert cause_of_waiting(few_cores) == "cpu_bound_loading"
    queued = fed_by(8, build_ms=339.0, step_ms=29.4, cpu_frac=None, cores=2.0, cpu_pct=172.0, loader_pct=137.0)
    assert cause_of_waiting(queued) == "cpu_bound_loading"  # more workers than cores queue before all are busy
    lock = fed_by(8, build_ms=385.0, step_ms=30.0, cpu_frac=None, cores=2.0, cpu_pct=60.0, loader_pct=5.0)
    assert feeding_of(lock).waits_outside


@given(TIMES, TIMES, st.integers(0, 16), st.floats(0, 1), st.floats(1, 64))
def test_no_gain_is_beyond_what_the_run_waited(build_ms, step_ms, workers, cpu_frac, cores):
    run = fed_by(workers, build_ms=build_ms, step_ms=step_ms, cpu_frac=cpu_frac, cores=cores)
    found = feeding_of(run)
    assert found is not None
    gain = found.gain(found.workers_advised)
    assert gain.low <= gain.factor <= gain.high
    assert gain.factor <= 1 / (1 - run.wait_frac) * (1 + 1e-6)
    assert 1 <= found.workers_needed <= found.workers_advised <= found.most_workers


@given(TIMES, st.integers(1, 8), st.integers(1, 8), st.floats(0, 1))
def test_more_workers_never_make_a_step_longer(build_ms, one, more, cpu_frac):
    found = feeding_of(fed_by(1, build_ms=build_ms, cpu_frac=cpu_frac))
    assert found.work.period_ms(one + more) <= found.work.period_ms(one)


def test_the_ceiling_bounds_a_gain_and_denies_one():
    assert feeding_of(fed_by(1, build_ms=40.0, ceiling=3.0)).gain(8).high == pytest.approx(3.0)
    assert not is_starved(fed_by(1, build_ms=11.0, wait_ms=0.9, ceiling=1.05))
    assert is_starved(fed_by(1, build_ms=20.0))
    assert not is_starved(fed_by(1, build_ms=20.0, steps=10))


def test_what_host_memory_and_a_stream_have_no_room_for_is_not_advised():
    machine = {"cpu_quota_cores": 8.0, "ram_gib": 1.0, "shm_gib": None}
    full = fed_by(1, build_ms=100.0, loading={"batch_mib": 100.0}, machine=machine)
    assert feeding_of(full).workers_advised == 4  # of 2 batches each, in 0.8 GiB
    assert feeding_of(fed_by(1, build_ms=100.0, loading={"most_workers": 2})).workers_advised == 2


def test_only_overrides_that_differ_are_given():
    run = fed_by(0, build_ms=20.0, loader={"backend": "auto"})
    assert knobs(run, backend="auto", num_workers=3) == ("loader.num_workers=3",)
    assert knobs(run, num_workers=None, persistent_workers=True) == (
        "loader.num_workers=null",
        "loader.persistent_workers=true",
    )


def test_programs_on_the_rest_of_a_machine_take_no_core_of_a_quota():
    quota = {"cpu_quota_cores": 4.0, "host_cores": 64}
    beside = feeding_of(fed_by(1, build_ms=40.0, cpu_frac=1.0, others_pct=3000.0, machine=quota))
    alone = feeding_of(fed_by(1, build_ms=40.0, cpu_frac=1.0, machine=quota))
    assert beside.figures() == alone.figures()
    full = feeding_of(fed_by(1, build_ms=40.0, cpu_frac=1.0, others_pct=6200.0, machine=quota))
    assert full.others == 2.0
