"""Batches that are ready, and have to be taken over from another process."""

import numpy as np
import pytest

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.rules.feeding_rules import slow_handover as check
from wellfed.explain.diagnosis.run_rules import run_rules

EVEN = np.full(200, 2.0)


def test_a_wait_that_each_step_has_alike_though_workers_keep_up():
    found = check(fed_by(2, build_ms=12.0, wait_ms=EVEN))
    assert found is not None
    assert "2 workers that build a batch in 12 ms keep up" in found.message
    assert "takes 2 ms of a step of 12.1 ms" in found.message
    assert found.change == ()
    assert found.lost_frac == pytest.approx(2 / 12.1, rel=0.01)
    assert [one.id for one in run_rules(fed_by(2, build_ms=12.0, wait_ms=EVEN))] == ["slow_handover"]


def test_data_with_fetch_is_read_by_threads():
    found = check(fed_by(2, build_ms=12.0, wait_ms=EVEN, loading={"has_fetch": True}))
    assert found is not None
    assert found.change == ("loader.backend=threads",)
    assert found.gain is not None


@pytest.mark.parametrize(
    "given",
    [
        fed_by(1, build_ms=30.0),  # too few
        fed_by(2, build_ms=12.0, wait_ms=np.where(np.arange(200) % 4 == 0, 8.0, 0.0)),  # uneven
        fed_by(2, build_ms=12.0, wait_ms=EVEN, backend="threads"),  # nothing is handed over
        fed_by(2, build_ms=12.0, wait_ms=0.2 * EVEN),  # little
    ],
)
def test_waiting_for_something_else_is_another_matter(given):
    assert check(given) is None
