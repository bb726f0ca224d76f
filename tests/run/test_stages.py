"""What the ranks of a run have in common."""

from dataclasses import replace

import pytest

from wellfed.planning.planned import Planned, RunPlan
from wellfed.run.stages import loads_as_rank_0


def plan(num_workers: int, micro_batch: int) -> RunPlan:
    knobs = {
        "loader.num_workers": Planned(num_workers, "what is free here", "predicted"),
        "loader.backend": Planned("threads", "timed", "measured"),
        "memory.micro_batch": Planned(micro_batch, "fits", "predicted"),
    }
    return replace(RunPlan(knobs, 7.2, False, "a card", ()), eval_workers=num_workers)


def test_ranks_load_as_rank_0_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLFED_LOADER", "")  # put back afterwards
    first = loads_as_rank_0(plan(2, 16), 0)
    assert first == plan(2, 16)
    second = loads_as_rank_0(plan(8, 4), 1)  # sees more room: no batches counted, or another machine's memory
    assert (second["loader.num_workers"], second.eval_workers) == (2, 2)
    assert second.knobs["loader.num_workers"] == first.knobs["loader.num_workers"]
    assert second["memory.micro_batch"] == 4


def test_a_rank_that_others_started_goes_by_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WELLFED_LOADER", raising=False)
    assert loads_as_rank_0(plan(8, 4), 1) == plan(8, 4)
