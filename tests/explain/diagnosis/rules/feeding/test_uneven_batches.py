"""Slow batches among others that are fast enough."""

import numpy as np

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import waiting_for_data

HEAVY = np.where(np.arange(200) % 8 == 0, 80.0, 4.0)


def check(run):
    found = waiting_for_data(run)
    return found if found is not None and found.id == "uneven_batches" else None


def uneven(**more):
    return fed_by(2, build_ms=HEAVY, wait_ms=np.where(HEAVY > 50, 30.0, 0.0), **more)


def test_batches_kept_ready_bridge_the_slow_ones():
    found = check(uneven())
    assert "The slowest batches take 80 ms" in found.message
    (change,) = found.change
    needed = int(change.removeprefix("loader.prefetch_factor="))
    # Two workers: begun so many steps before it is due, behind the others of its worker.
    assert 2 * needed * 10.1 - (needed - 1) * HEAVY.mean() >= 80


def test_as_many_as_memory_has_room_for():
    small = {"cpu_quota_cores": 8.0, "ram_gib": 1.0}
    assert check(uneven(loading={"batch_mib": 100.0}, machine=small)).change == ("loader.prefetch_factor=4",)


def test_workers_that_are_too_few_on_average_and_even_batches_are_another_matter():
    assert check(fed_by(2, build_ms=8 * HEAVY)) is None
    assert check(fed_by(2, build_ms=15.0, wait_ms=2.0)) is None


def test_a_dataloader_of_the_user_s_is_made_again_with_more_ahead():
    (only,) = check(uneven(backend="own")).change
    assert only.startswith("loader.prefetch_factor=")
