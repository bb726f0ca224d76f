"""Starts several ranks on this machine, as processes of this one that talk by Gloo over its loopback."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RankWork = Callable[[int, int], Any]
"""What a rank does, by its number and how many there are; of the first one it is kept what it gives, as JSON."""


def on_ranks(work: RankWork, size: int) -> Any:
    """What the first rank has found."""
    start = multiprocessing.get_context("fork").Process
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(target=_one, args=(work, rank, size, Path(folder))) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))


def _one(work: RankWork, rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = work(rank, size)
    dist.barrier()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
