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


@pytest.mark.parametrize(
    ("asked", "shm_gib", "ram_gib", "data", "mib", "parts"),
    [
        (("processes", 8, 4), 0.0625, 32.0, ITEMS, 10, ["320.0 MiB", "/dev/shm has 64.0 MiB", "num_workers=1", "=1g"]),
        (("torch", 8, 4), 0.0625, 32.0, ITEMS, 10, ["8 worker processes"]),
        (("threads", 4, 2), 64.0, 1.0, FETCH, 100, ["800.0 MiB", "host memory has 768.0 MiB", "loader.num_workers=3"]),
        (("processes", 4, 2), 64.0, 1.0, ITEMS, 100, ["host memory has 768.0 MiB", "loader.num_workers=3"]),
        (("processes",), 0.0625, 32.0, ITEMS, 40, ["loader=baseline"]),
    ],
)
def test_batches_that_find_no_room_are_refused(asked, shm_gib, ram_gib, data, mib, parts):
    message = faults_of(given(*asked), facts(shm_gib, ram_gib=ram_gib), data=data, trial=sized(mib))
    assert "the batches kept ready don't fit" in message
    assert [part for part in parts if part not in message] == []


def test_threads_need_no_shm():
    assert planned(given("threads", 8, 4), facts(0.0625), trial=sized(10)).loader.num_workers == 8
    assert planned(given("processes", 8, 4), facts(), data=ITEMS, trial=sized(10)).loader.num_workers == 8  # no shm


def test_devices_share_the_host():
    alone = planned(given("processes", 2, 2, trainer={"devices": 1}), facts(0.5), data=ITEMS, trial=sized(75))
    assert alone.loader.num_workers == 2
    two = dataclasses.replace(TWO, shm_free_gib=0.5)
    message = faults_of(given("processes", 2, 2, trainer={"devices": 2}), two, data=ITEMS, trial=sized(75))
    assert "2 worker processes x 2 batches each x 75.0 MiB x 2 devices = 600.0 MiB" in message


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
