"""Generators of several ranks: each resumes with its own."""

import multiprocessing
import os
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.kit import tiny

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Draws(pl.Callback):
    """A callback that draws at each step, and records the numbers."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        with self._file.open("a") as stream:
            stream.write(f"{trainer.global_step} {random.random()} {torch.rand(())}\n")


def _train(rank: int, folder: Path, name: str, steps: int, checkpoint: Path | None) -> None:
    """Runs one of two ranks, which have drawn different numbers of times before."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    store = torch.distributed.FileStore(str(folder / f"{name}.store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    random.seed(rank)
    module = tiny.module(dropout=0.2)
    torch.manual_seed(7 + rank)
    callbacks = [Draws(folder / f"{name}.{rank}"), tiny.checkpoints(folder / name)]
    batches = tiny.loader(rank=rank, world_size=2)
    options = {"devices": 2, "strategy": "ddp", "max_steps": steps}
    tiny.fit(module, folder, callbacks, checkpoint=checkpoint, batches=batches, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_each_rank_goes_on_with_its_own_generators(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")

    def run(name: str, steps: int, checkpoint: Path | None) -> None:
        arguments = (tmp_path, name, steps, checkpoint)
        ranks = [context.Process(target=_train, args=(rank, *arguments)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
            process.kill()
            assert process.exitcode == 0

    run("unbroken", 6, None)
    run("first", 3, None)
    run("second", 6, tmp_path / "first" / "last.ckpt")
    for rank in (0, 1):
        drawn = {name: (tmp_path / f"{name}.{rank}").read_text() for name in ("unbroken", "first", "second")}
        assert drawn["first"] + drawn["second"] == drawn["unbroken"]
