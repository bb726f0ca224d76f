"""Batches of a split that is evaluated: the same whoever builds them, and for any number of ranks."""

import os
from typing import Any

import pytest
import torch

from tests.kit import sets
from tests.kit.few import few
from wellfed.data.backends import thread_backend
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError

PLANS = {
    "threads": LoaderSettings("threads", 2, 2),
    "processes": LoaderSettings("processes", 2, 2),
    "persistent": LoaderSettings("processes", 1, 2, persistent_workers=True),
    "torch": LoaderSettings("torch", 1, 2),
}


def taken(made: EvalLoader) -> list[Any]:
    return [(one.index, one.total, {name: values.tolist() for name, values in one.batch.items()}) for one in made]


@pytest.mark.parametrize("name", PLANS)
def test_whoever_builds_them_the_batches_are_the_same_in_each_pass(name: str) -> None:
    expected = taken(EvalLoader(sets.Fetching(), 4, seed=1))
    assert [index for _, _, batch in expected for index in batch["index"]] == list(range(sets.SIZE))
    assert [total for _, total, _ in expected] == [4, 4, 4, 4, 4, 3]
    assert len(EvalLoader(sets.Fetching(), 4, seed=1, limit_batches=1)) == 1
    made = EvalLoader(sets.Fetching(), 4, seed=1, settings=PLANS[name])
    assert next(iter(made)).index == 0  # a pass that is given up
    for _ in range(2):
        assert taken(made) == expected
    made.close()


class Where(sets.Fetching):
    def fetch(self, indices: torch.Tensor, rng: Any) -> Any:
        return {"process": torch.full_like(indices, os.getpid())}


def test_worker_processes_that_live_on_serve_each_pass_and_end_with_the_loader() -> None:
    made = EvalLoader(Where(), 4, seed=1, settings=PLANS["persistent"])
    passes = [{process for _, _, batch in taken(made) for process in batch["process"]} for _ in range(2)]
    assert passes[0] == passes[1]
    assert os.getpid() not in passes[0]
    made.close()
    for process in passes[0]:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_no_more_workers_than_batches_and_none_for_one() -> None:
    plan = LoaderSettings("processes", 8, 2)
    made = EvalLoader(Where(), 12, seed=1, settings=plan)
    assert len({process for _, _, batch in taken(made) for process in batch["process"]}) == 2
    assert made.settings.num_workers == 2
    (only,) = EvalLoader(Where(), 30, seed=1, settings=plan)
    assert set(only.batch["process"].tolist()) == {os.getpid()}


@pytest.mark.parametrize("world_size", few([3, 2, 7], 1))
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_ranks_share_the_batches(name: str, world_size: int) -> None:
    ranks = [
        EvalLoader(sets.Fetching(), 4, seed=1, settings=PLANS[name], rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    of_ranks = [taken(rank) for rank in ranks]
    together = sorted((one for rank in of_ranks for one in rank), key=lambda one: one[0])
    assert together == taken(EvalLoader(sets.Fetching(), 4, seed=1))
    for rank, found in zip(ranks, of_ranks, strict=True):
        assert len(rank) - 1 <= len(found) <= len(rank) == -(-6 // world_size)


def test_a_split_of_one_sample_or_none() -> None:
    ranks = [EvalLoader(torch.arange(1.0), 4, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
    assert [(len(rank), len(list(rank))) for rank in ranks] == [(1, 1), (1, 0)]
    assert list(EvalLoader([], 4, seed=1, settings=PLANS["processes"], rank=1, world_size=2)) == []


@pytest.mark.parametrize(
    ("plan", "kind"),
    [(None, sets.BreakingItems), (PLANS["processes"], sets.BreakingItems)],
)
def test_a_sample_that_fails_is_named_with_its_cause(plan: LoaderSettings | None, kind: Any) -> None:
    made = EvalLoader(kind("raise", 6), 4, seed=1, settings=plan)
    with pytest.raises(
        DataError, match=rf"^{kind.__name__}: evaluation sample 6 could not be loaded \(batch 1\): OSErr"
    ):
        list(made)
    made.close()


def test_a_batch_that_hangs_in_a_thread_is_an_error_with_its_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_backend, "_STOP_S", 0.01)
    made = EvalLoader(sets.Breaking("hang", 6), 4, seed=1, settings=LoaderSettings("threads", 1, 2, timeout_s=0.25))
    with pytest.raises(DataError, match=r"timeout_s=0\.25 s.* evaluation batch 1 of epoch 0 \(samples 4, 5, 6, 7\)"):
        list(made)
    made.close()
