"""Steps of many small kernels that the host can't launch fast enough."""

import numpy as np
import pytest

from tests.kit.card_evidence import on_card
from wellfed.explain.diagnosis.rules.compute_rules import launch_bound, small_batch
from wellfed.explain.diagnosis.run_rules import run_rules

LATE = {"launch_frac": 1.0, "card": {"util_pct": 25, "sm_active_pct": 25}}


def test_graphs_and_at_most_what_the_card_idles():
    found = launch_bound(on_card(**LATE))
    assert found is not None
    assert found.change == ("gpu.compile=reduce-overhead",)
    assert found.gain is not None
    assert found.gain.high == pytest.approx(4, rel=0.05)
    assert found.gain.factor == pytest.approx(2, rel=0.05)
    assert found.message.startswith("The GPU is busy for 25.3 % of the compute time of a step. The host takes 99.9 %")


def test_a_model_that_can_not_be_compiled_is_not_advised_to():
    found = launch_bound(on_card(**LATE, refused=["gpu.compile"]))
    assert found is not None
    assert found.change == ()


def test_what_passes_between_steps_comes_first_if_it_takes_longer():
    """No launch that is saved makes a logger faster."""
    with_logger = on_card(
        launch_frac=1.0,
        compute_ms=24.0,
        host_ms=32.0,
        card={"util_pct": 1, "sm_active_pct": 1},
        columns={"host_ms": np.full(100, 32.0)},
        wall=None,
    )
    found = {one.id: one for one in run_rules(with_logger)}
    assert [*found][:2] == ["slow_callbacks", "launch_bound"]
    assert found["launch_bound"].gain.high <= 1 / (1 - 24 / 56) + 0.01


def test_lines_that_wait_as_well_are_named():
    lines = [{"place": "net.py:7", "per_step": 133.0}]
    late = {"launch_frac": 1.0, "card": {"util_pct": 15, "sm_active_pct": 5}}
    found = launch_bound(on_card(**late, synchronisations=lines))
    assert found is not None
    assert found.message.endswith("The host also waits for the GPU at net.py:7 (133 times a step).")


def test_compiled_already():
    found = launch_bound(on_card(**LATE, plan={"gpu.compile": "reduce-overhead"}))
    assert found is not None
    assert found.change == ()


def test_fewer_passes_come_before_graphs():
    split = on_card(**LATE, num_micro=8)
    assert launch_bound(split) is None
    assert small_batch(split) is not None


@pytest.mark.parametrize("figures", [{}, LATE | {"launch_frac": 0.5}, LATE | {"launch_frac": None}])
def test_silent(figures):
    assert launch_bound(on_card(**figures)) is None
