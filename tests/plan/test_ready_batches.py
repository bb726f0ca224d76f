"""Batches kept ready against host memory and /dev/shm, from recorded facts."""

import dataclasses

import pytest

from tests.kit.machines import GIB, TWO, machine
from tests.plan.test_decide import FETCH, ITEMS, config, faults_of, planned
from wellfed.config.schema import Backend
from wellfed.data.backends.first_batches import FirstBatches

MIB = 2**20


def sized(mib, num_batches=1000):
    return FirstBatches(50.0, int(mib * MIB), num_batches)


def facts(shm_gib=None, ram_gib=32.0, **more):
    """``ram_gib``: a quarter of it is taken."""
    return dataclasses.replace(machine(cores=8.0, ram_gib=ram_gib, **more), shm_free_gib=shm_gib)


def given(backend, num_workers=None, prefetch_factor=None, **more):
    asked = {"backend": Backend[backend], "num_workers": num_workers, "prefetch_factor": prefetch_factor}
    return config(loader=asked, **more)


def test_worker_processes_need_room_in_shm():
    message = faults_of(given("processes", 8, 4), facts(0.0625), data=ITEMS, trial=sized(10))
    assert message == (
        "loader.num_workers=8: the batches kept ready don't fit: 8 worker processes x 4 batches each x 10.0 MiB "
        "= 320.0 MiB, and /dev/shm has 64.0 MiB free. Set loader.num_workers=1, or loader=baseline, which keeps none "
        "ready. A container gets more by docker run --shm-size=1g."
    )
    assert "loader.backend=threads" in faults_of(given("processes", 8, 4), facts(0.0625), data=FETCH, trial=sized(10))
    assert "8 worker processes" in faults_of(given("torch", 8, 4), facts(0.0625), data=ITEMS, trial=sized(10))
    assert planned(given("threads", 8, 4), facts(0.0625), trial=sized(10)).loader.num_workers == 8
    assert planned(given("processes", 8, 4), facts(), data=ITEMS, trial=sized(10)).loader.num_workers == 8  # no shm


def test_all_workers_need_host_memory():
    for backend, workers in (("threads", "threads"), ("processes", "worker processes")):
        message = faults_of(given(backend, 4, 2), facts(64.0, ram_gib=1.0), trial=sized(100))
        assert message == (
            f"loader.num_workers=4: the batches kept ready don't fit: 4 {workers} x 2 batches each x 100.0 MiB "
            "= 800.0 MiB, and host memory has 768.0 MiB free. Set loader.num_workers=3, or loader.prefetch_factor=1, "
            "or loader=baseline, which keeps none ready."
        )


def test_devices_share_the_host():
    alone = planned(given("processes", 2, 2, trainer={"devices": 1}), facts(0.5), data=ITEMS, trial=sized(75))
    assert alone.loader.num_workers == 2
    two = dataclasses.replace(TWO, shm_free_gib=0.5)
    message = faults_of(given("processes", 2, 2, trainer={"devices": 2}), two, data=ITEMS, trial=sized(75))
    assert "2 worker processes x 2 batches each x 75.0 MiB x 2 devices = 600.0 MiB" in message


@pytest.mark.parametrize(("free_mib", "warned", "fits"), [(79, None, False), (81, True, True), (101, False, True)])
def test_near_the_limit_is_a_warning(free_mib, warned, fits):
    asked = (given("processes", 2, 4), facts(free_mib / 1024))
    if not fits:
        assert "don't fit" in faults_of(*asked, data=ITEMS, trial=sized(10))
        return
    plan = planned(*asked, data=ITEMS, trial=sized(10))
    assert [text[:57] for text in plan.warnings] == [
        "loader.num_workers=2: little is left beside the batches k"
    ] * warned


def test_no_more_is_held_than_an_epoch_has():
    assert planned(given("processes", 8, 4), facts(0.0625), data=ITEMS, trial=sized(10, 4)).loader.num_workers == 8
    message = faults_of(given("processes", 8, 4), facts(0.0625), data=ITEMS, trial=sized(20, 4))
    assert "don't fit: 4 batches (a whole epoch) x 20.0 MiB = 80.0 MiB" in message


def test_a_number_left_to_the_plan_is_one_that_fits():
    count = planned(given("processes"), facts(0.0625), data=ITEMS, trial=sized(10)).knobs["loader.num_workers"]
    assert (count.value, count.source) == (2, "measured")
    assert count.because.endswith("; the batches of 2 fit into 0.8 of /dev/shm")
    assert planned(given("processes"), facts(2.0), data=ITEMS, trial=sized(10)).loader.num_workers == 8
    assert "don't fit" in faults_of(given("processes"), facts(0.0625), data=ITEMS, trial=sized(40))


def test_without_a_batch_nothing_is_checked():
    assert planned(given("processes", 8, 4), facts(0.001), data=ITEMS).loader.num_workers == 8
    assert planned(given("processes", 8, 4), facts(0.001), data=ITEMS, trial=sized(0)).loader.num_workers == 8
    assert sized(1024).batch_bytes == GIB
