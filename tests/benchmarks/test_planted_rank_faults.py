"""Real runs of two ranks: the rank that is slow is named, and a healthy run is not accused."""

import sys
from pathlib import Path

import pytest

from benchmarks.planted_rank_faults import FAULTS, RankMachine, judge
from tests.fake_cuda.marker import simulated_machine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks")]


@pytest.mark.parametrize(
    ("kind", "where"),
    [("input_inline", "cpu"), ("healthy", "cpu"), ("slow_copy", "simulated"), ("hot_card", "simulated")],
)
def test_the_slow_rank_of_two_is_named(kind: str, where: str, tmp_path: Path) -> None:
    """On the cards nothing blocks the host of rank 0 but its own card, where figures are logged."""
    if where == "simulated":
        simulated_machine()
    fault = next(one for one in FAULTS if (one.kind, one.where, one.strategy) == (kind, where, "ddp"))
    with RankMachine(tmp_path) as machine:
        found = judge(machine, fault, 2, 1)
        assert found.is_right, found
        if kind == "input_inline":
            assert found.said.startswith("Rank 0 waits for rank 1 (on node-a): in each step it waits 4")
            assert "loader.num_workers=" in found.said
