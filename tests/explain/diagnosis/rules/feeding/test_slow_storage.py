"""Batches that wait for a disk."""

import numpy as np

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import slow_storage as check

EPOCH = np.repeat([0.0, 1.0], 100)


def test_a_disk_that_cores_wait_for_is_told():
    found = check(fed_by(2, build_ms=80.0, iowait_pct=20.0))
    assert "a batch takes 80 ms to build, only 5.0 % of it CPU time" in found.message
    assert "20 % of the time" in found.message
    assert found.change == ("loader.num_workers=9",)
    assert found.gain.low == 1.0


def test_a_cold_first_epoch_is_told():
    cold = np.where(EPOCH == 0, 90.0, 8.0)
    found = check(fed_by(2, build_ms=cold, wait_ms=np.where(EPOCH == 0, 35.0, 0.0), epoch=EPOCH))
    assert "in the first epoch it took 11 times as long as later" in found.message


def test_building_that_is_work_or_waits_for_nobody_knows_what_is_another_matter():
    assert check(fed_by(2, build_ms=80.0, iowait_pct=20.0, cpu_frac=0.9)) is None
    assert check(fed_by(2, build_ms=80.0, iowait_pct=1.0)) is None


def test_a_dataloader_of_the_user_s_is_built_anew():
    found = check(fed_by(2, build_ms=80.0, iowait_pct=20.0, backend="own"))
    assert found.change == ("loader.backend=auto", "loader.num_workers=9")
