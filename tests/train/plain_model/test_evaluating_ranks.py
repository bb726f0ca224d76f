"""Evaluation by several ranks: real processes with gloo."""

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import loop, tiny
from wellfed.data.eval_loader import EvalLoader
from wellfed.train.loop.place import Place
from wellfed.train.plain_model.split_metrics import can_be_shared

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks")


class Alone:
    """An evaluation without merge."""

    def reset(self) -> None: ...

    def update(self, model: Any, batch: Any) -> None: ...

    def compute(self) -> dict[str, float]:
        return {}


def test_an_evaluation_that_does_not_say_how_to_merge_is_not_shared() -> None:
    assert can_be_shared(None)
    assert not can_be_shared(Alone())  # type: ignore[arg-type]


def _evaluate(rank: int, world_size: int, data: Any, folder: Path) -> None:
    """Evaluates on one rank, and writes its metrics and the number of its samples."""
    torch.set_num_threads(1)
    placed = loop.model(shares_evaluation=world_size > 1)
    loader = EvalLoader(data, 8, seed=1, rank=rank, world_size=world_size)
    if world_size > 1:
        os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        placed.place = Place(devices=2, strategy="ddp")
        store = torch.distributed.FileStore(str(folder / "store"), world_size)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
    found: list[Any] = []

    for _ in range(2):  # the second pass knows nothing of the first
        found.append([loop.validated(placed, loader), sum(placed.model.seen)])
        placed.model.seen.clear()
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(found))


def by_two_ranks(data: Any, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_evaluate, args=(rank, 2, data, folder), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()


@linux
@pytest.mark.parametrize("num_samples", [70, 16, 1])
def test_two_ranks_share_the_batches_and_have_the_result_of_one(num_samples: int, tmp_path: Path) -> None:
    _evaluate(0, 1, tiny.TinyData(num_samples), tmp_path)
    by_two_ranks(tiny.TinyData(num_samples), tmp_path)
    alone, first, second = (json.loads((tmp_path / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json"))
    for (whole, seen), (one, seen_by_one), (other, seen_by_other) in zip(alone, first, second, strict=True):
        assert one == other  # whatever is decided by it is decided alike
        assert one["loss"] == pytest.approx(whole["loss"], rel=1e-12)
        assert seen_by_one + seen_by_other == seen == num_samples
        assert seen_by_one < seen or num_samples == 1
