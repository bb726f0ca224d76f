"""Runs a function as several processes that gloo connects, and gives back what each has left."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def join(number: int, folder: Path, size: int = 2) -> None:
    """Joins the process group; each process calls it first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)


def leave(number: int, folder: Path, found: Any) -> None:
    """Saves the result and leaves the process group; each process calls it last."""
    torch.save(found, folder / f"{number}.pt")
    dist.destroy_process_group()


def of_ranks(target: Callable[[int, Path], None], folder: Path, size: int = 2) -> list[Any]:
    """Runs the ranks and returns the result of each; all must end well within a minute."""
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=target, args=(number, folder)) for number in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(size)]
