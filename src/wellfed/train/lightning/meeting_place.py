"""Where the ranks that torchrun or srun has started will meet, as Lightning reads it from what they have written."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment


def meeting_place(by: Literal["torchrun", "srun", "Lightning"]) -> tuple[str, int]:
    """Host and port of the store of rank 0; sets ``MASTER_ADDR`` and ``MASTER_PORT`` where Slurm says it otherwise."""
    environment = TorchElasticEnvironment() if by == "torchrun" else SLURMEnvironment()
    return environment.main_address, environment.main_port
