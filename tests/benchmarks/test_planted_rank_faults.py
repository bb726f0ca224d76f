"""Real runs of two ranks by Gloo: the rank that is starved is named, and a healthy run is not accused."""

import sys
from pathlib import Path

import pytest

from benchmarks.planted_rank_faults import FAULTS, RankMachine, judge

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks")]


@pytest.mark.parametrize("kind", ["input_inline", "healthy"])
def test_the_starved_rank_of_two_is_named(kind: str, tmp_path: Path) -> None:
    fault = next(one for one in FAULTS if (one.kind, one.where) == (kind, "cpu"))
    with RankMachine(tmp_path) as machine:
        found = judge(machine, fault, 2, 1)
        assert found.is_right, found
        if kind == "input_inline":
            assert found.said.startswith("Rank 0 waits for rank 1 (on node-a): in each step it waits 4")
            assert "loader.num_workers=" in found.said
