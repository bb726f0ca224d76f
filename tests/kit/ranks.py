"""Several processes that train a tiny workload together, with a time limit."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


def train_ranks(folder: Path, world: int, environment: Mapping[str, str] = os.environ, **settings: Any) -> list[Any]:
    """Runs the ranks and returns the result of each (see `tests.kit.rank`). Raises an error if one hangs or dies.

    Args:
        environment: where the processes find their cards.
    """
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chosen = json.dumps({"folder": str(folder), "devices": world, **settings})
    search = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    shared = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(search)}
    shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.kit.rank", chosen],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    until = time.monotonic() + LIMIT_S
    try:
        errors = [process.communicate(timeout=max(1, until - time.monotonic()))[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(errors)[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
