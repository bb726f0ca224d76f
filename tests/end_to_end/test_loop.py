"""What a whole run adds to a training step stays well below what Lightning's defaults add."""

from statistics import median

import pytest

from benchmarks.loop import LOOPS, MOST_CALLS, TURN, calls_a_step, measure, over_raw
from tests.kit.few import slow

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


@pytest.mark.parametrize("name", ["ours", slow("ours_bare")])
def test_a_run_adds_few_calls_to_a_step(name: str) -> None:
    """No other process changes these counts, as it changes times. `benchmarks/loop.py --calls` lists them."""
    found = calls_a_step(["raw", name])
    added = sum(found[name].values()) - sum(found["raw"].values())
    more = {function: number for function, number in found[name].items() if function not in found["raw"]}
    assert added <= MOST_CALLS[name] + 2, more
    assert added > MOST_CALLS[name] - 30, "a run adds fewer calls: lower MOST_CALLS"


@pytest.mark.slow
def test_a_run_adds_less_time_to_a_step_than_lightnings_defaults() -> None:
    found = measure(["raw", "ours", "lightning_default"], rounds=3, num_steps=120)
    pairs = zip(over_raw(found, "ours"), over_raw(found, "lightning_default"), strict=True)
    assert median(ours / lightning for ours, lightning in pairs) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_all_loops_train_the_other_network_too(name: str) -> None:
    (cost,) = measure([name], rounds=1, num_steps=TURN, model="lstm")[name]
    assert cost.wall_us > 0
