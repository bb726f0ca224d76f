"""Workers that are too few for the steps."""

import pytest

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import too_few_workers as check


def test_the_number_and_its_gain_are_told():
    found = check(fed_by(1, build_ms=41.0, step_ms=11.9))
    assert "one worker builds a batch in 41 ms, a step takes 12 ms; 4 workers are needed" in found.message
    assert "1 is set" in found.message
    assert found.change == ("loader.num_workers=5",)
    assert found.gain.factor == pytest.approx(41 / 12, rel=0.01)


def test_more_than_cores_only_where_building_waits():
    assert check(fed_by(2, build_ms=160.0, cores=2.0)).change == ("loader.num_workers=17",)
    found = check(fed_by(1, build_ms=40.0, cpu_frac=1.0, cores=2.0, on_gpu=True))
    assert found.change == ("loader.num_workers=2",)
    assert "Then all 2 cores are full, and steps still wait." in found.message
    assert "a lock" not in found.message


def test_what_batches_wait_for_may_serve_no_more_of_them():
    found = check(fed_by(1, build_ms=41.0, step_ms=11.9))
    assert "Only 5.0 % of building is CPU time: more workers win nothing where batches wait for a lock" in found.message
    assert found.gain.low == 1.0


def test_a_dataloader_of_the_user_s_is_built_anew():
    found = check(fed_by(2, build_ms=50.0, cpu_frac=None, backend="own"))
    assert found.change == ("loader.backend=auto", "loader.num_workers=6")
    assert "about 50 ms" in found.message
    found = check(fed_by(2, build_ms=50.0, cpu_frac=None, backend="own", refused=["loader.backend"]))
    assert found.change == ()
