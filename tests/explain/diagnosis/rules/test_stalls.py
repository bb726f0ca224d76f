"""A storage that stands still like a clock is no random latency."""

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.rules.feeding_rules import slow_storage, uneven_batches


def stalled(places, ms=4000.0, steps=800):
    wait_ms = np.zeros(steps)
    wait_ms[places] = ms
    columns = {"wait_ms": wait_ms, "build_ms": wait_ms + 0.5, "time_s": np.cumsum(wait_ms + 20.1) / 1e3}
    loading = {"build_ms_mean": float(wait_ms.mean()) + 0.5, "cpu_frac": 0.05}
    mean_ms = float(wait_ms.mean())
    plan = {"loader.num_workers": 0, "loader.backend": "inline"}
    return evidence(steps=steps, wait_ms=mean_ms, compute_ms=20.0, columns=columns, loading=loading, plan=plan)


def test_stalls_as_regular_as_a_clock_are_of_the_storage():
    case = stalled(slice(100, None, 100))
    found = slow_storage(case)
    assert found is not None
    assert " of training waits for data, 100.0 % of that in one step every 6.0 s, for 4.0 s" in found.message
    assert found.evidence["stall_period_s"] == pytest.approx(6.01, rel=0.01)
    assert uneven_batches(case) is None


@pytest.mark.parametrize("places", [[30, 50, 200, 480, 500, 700, 760], slice(200, None, 200)])
def test_those_without_order_or_few_of_them_are_random_latency(places):
    case = stalled(places)
    assert slow_storage(case) is None
    assert "random latency" in uneven_batches(case).message
