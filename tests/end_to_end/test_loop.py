"""What a whole run adds to a training step stays well below what Lightning's defaults add."""

from __future__ import annotations

import sys
from statistics import median

import pytest

from benchmarks.loop import LOOPS, WARMUP, measure, over_raw, prepared

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


@pytest.mark.slow
def test_a_run_adds_less_time_to_a_step_than_lightnings_defaults() -> None:
    found = measure(["raw", "ours", "lightning_default"], rounds=3, num_steps=120)
    pairs = zip(over_raw(found, "ours"), over_raw(found, "lightning_default"), strict=True)
    assert median(ours / lightning for ours, lightning in pairs) < 0.4


@pytest.mark.slow
def test_a_run_adds_fewer_calls_to_a_step_than_lightnings_defaults() -> None:
    # 330 to Lightning's 4,000 (2.6). No other process changes that.
    with prepared() as scratch:
        counts = {}
        for name in ("raw", "ours", "lightning_default"):
            LOOPS[name](WARMUP + 5, scratch)
            few, many = (calls(name, num_steps, scratch) for num_steps in (WARMUP + 5, WARMUP + 105))
            counts[name] = (many - few) / 100
    assert counts["ours"] - counts["raw"] < 0.2 * (counts["lightning_default"] - counts["raw"]), counts


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_all_loops_train_the_other_network_too(name: str) -> None:
    with prepared() as scratch:
        assert LOOPS[name](WARMUP + 5, scratch, "lstm") > 0


def calls(name, num_steps, scratch):
    """Calls of Python and C functions while a loop runs."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        LOOPS[name](num_steps, scratch)
    finally:
        sys.setprofile(before)
    return count
