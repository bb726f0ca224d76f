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
from wellfed.train.lightning.callbacks.figures import Figures

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Draws(pl.Callback):
    """A callback that draws at each step, and records the numbers."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        with self._file.open("a") as stream:
            stream.write(f"{trainer.global_step} {random.random()} {torch.rand(())}\n")


def _train(rank: int, world_size: int, folder: Path, name: str, steps: int, checkpoint: Path | None) -> None:
    """Runs one of several ranks, which have drawn different numbers of times before."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    store = torch.distributed.FileStore(str(folder / f"{name}.store"), world_size)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    torch.distributed.init_process_group("gloo", store=store, **ranks, timeout=timedelta(seconds=60))
    random.seed(rank)
    module = tiny.module(dropout=0.2)
    torch.manual_seed(7 + rank)

    def take(split: str, values: dict[str, float], **at: Any) -> None:
        with (folder / f"{name}.loss").open("a") as stream:
            stream.write(f"{values['loss']} ")

    figures = Figures(take, every=100, stop_on_nan=False)
    callbacks = [Draws(folder / f"{name}.{rank}"), figures, tiny.checkpoints(folder / name, every_steps=2)]
    batches = tiny.loader(**ranks)
    options = {"devices": world_size, "strategy": "ddp", "max_steps": steps}
    tiny.fit(module, folder, callbacks, checkpoint=checkpoint, batches=batches, **options)


def _run(folder: Path, name: str, steps: int, checkpoint: Path | None, world_size: int = 2) -> list[str]:
    """Trains and returns the numbers that each rank has drawn."""
    context = multiprocessing.get_context("fork")
    arguments = (world_size, folder, name, steps, checkpoint)
    ranks = [context.Process(target=_train, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        process.kill()
        assert process.exitcode == 0
    return [(folder / f"{name}.{rank}").read_text() for rank in range(world_size)]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_each_rank_goes_on_with_its_own_generators(tmp_path: Path) -> None:
    unbroken = _run(tmp_path, "unbroken", 6, None)
    first = _run(tmp_path, "first", 3, None)
    second = _run(tmp_path, "second", 6, tmp_path / "first" / "last.ckpt")
    assert [one + two for one, two in zip(first, second, strict=True)] == unbroken


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_means_of_an_epoch_cover_all_of_it_after_a_resume_within(tmp_path: Path) -> None:
    _run(tmp_path, "unbroken", 3, None)
    _run(tmp_path, "second", 3, tmp_path / "unbroken" / "last-1.ckpt")
    unbroken, second = (float((tmp_path / f"{name}.loss").read_text()) for name in ("unbroken", "second"))
    assert second == pytest.approx(unbroken, rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_ranks_that_join_at_a_resume_draw_their_own_numbers(tmp_path: Path) -> None:
    (unbroken,) = _run(tmp_path, "unbroken", 5, None, world_size=1)
    _run(tmp_path, "first", 3, None, world_size=1)
    own, joined = _run(tmp_path, "second", 5, tmp_path / "first" / "last.ckpt")
    assert own.splitlines()[0] == unbroken.splitlines()[3]  # later ones depend on a rank's share of the samples
    drawn = [[set(line.split()[1:]) for line in lines.splitlines()] for lines in (own, joined)]
    assert all(not ours & theirs for ours, theirs in zip(*drawn, strict=True))
