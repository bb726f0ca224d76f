"""Steps of many small kernels that the host can't launch fast enough."""

import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.compute import launch_bound, small_batch

LATE = {"launch_frac": 1.0, "card": {"util_pct": 25, "sm_active_pct": 25}}


def test_graphs_and_at_most_what_the_card_idles():
    found = launch_bound.check(on_card(**LATE))
    assert found is not None
    assert found.change == ("gpu.compile=reduce-overhead",)
    assert found.gain is not None
    assert found.gain.high == pytest.approx(4, rel=0.05)
    assert found.gain.factor == pytest.approx(2, rel=0.05)
    assert found.message.startswith("The GPU is busy for 25.3 % of a step: the host takes 99.9 % of it to launch")


def test_lines_that_wait_as_well_are_named():
    lines = [{"place": "net.py:7", "per_step": 133.0}]
    late = {"launch_frac": 1.0, "card": {"util_pct": 15, "sm_active_pct": 5}}
    found = launch_bound.check(on_card(**late, synchronisations=lines))
    assert found is not None
    assert found.message.endswith("The host also waits for the GPU at net.py:7 (133 times a step).")


def test_compiled_already():
    found = launch_bound.check(on_card(**LATE, plan={"gpu.compile": "reduce-overhead"}))
    assert found is not None
    assert found.change == ()


def test_fewer_passes_come_before_graphs():
    split = on_card(**LATE, num_micro=8)
    assert launch_bound.check(split) is None
    assert small_batch.check(split) is not None


@pytest.mark.parametrize("figures", [{}, LATE | {"launch_frac": 0.5}, LATE | {"launch_frac": None}])
def test_silent(figures):
    assert launch_bound.check(on_card(**figures)) is None
