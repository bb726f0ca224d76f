"""Ranks: which process of a run this one is, as torchrun, Slurm or Lightning say, and its share of a step's samples."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that ranks sum in one call; DDP's default for ``bucket_cap_mb``."""


@dataclass(frozen=True)
class Launch:
    """What a launcher has started on all machines, and which of it this process is."""

    by: Literal["torchrun", "srun"]
    rank: int
    local_rank: int
    """Among the ranks of this machine."""
    node: int
    """Number of this machine."""
    world_size: int
    num_nodes: int
    devices: int
    """Ranks on this machine."""
    job: str | None = None
    """Names what was started; the same when it is started again. None: it has no name of its own."""
    attempt: int = 0
    """How often it was started before."""

    @property
    def is_first_of_node(self) -> bool:
        """It does what is done once on each machine."""
        return self.local_rank == 0


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """None where neither torchrun nor srun has started this process. Of both, torchrun within srun, it is torchrun."""

    def number(name: str, default: int) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else default

    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        world_size, devices = number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1)
        name = environ["TORCHELASTIC_RUN_ID"]
        return Launch(
            "torchrun",
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            node=number("GROUP_RANK", 0),
            world_size=world_size,
            num_nodes=number("GROUP_WORLD_SIZE", max(1, world_size // devices)),
            devices=devices,
            job=None if name in ("", "none") else f"torchrun {name}",  # "none" is that of all without --rdzv-id
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        )
    # An interactive shell within a job has the variables of the job, and nobody has started its processes.
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        world_size, num_nodes = number("SLURM_NTASKS", 1), number("SLURM_NNODES", 1)
        job = environ.get("SLURM_JOB_ID")
        return Launch(
            "srun",
            rank=number("SLURM_PROCID", 0),
            local_rank=number("SLURM_LOCALID", 0),
            node=number("SLURM_NODEID", 0),
            world_size=world_size,
            num_nodes=num_nodes,
            devices=number("SLURM_NTASKS_PER_NODE", max(1, world_size // num_nodes)),
            job=None if job is None else f"slurm {job}",
            attempt=number("SLURM_RESTART_COUNT", 0),
        )
    return None


def requeue(environ: Mapping[str, str] = os.environ) -> str | None:
    """Has Slurm queue this job again, which `scontrol` does; why it could not. None also outside of srun."""
    launch = launched(environ)
    if launch is None or launch.by != "srun" or launch.job is None:
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"scontrol requeue {job}: {getattr(error, 'stderr', None) or error}"
    return None


def own_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank this process was started as, by whomever; 0 where nobody says so."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def own_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The same among the ranks of this machine, which is the number of the card that Lightning gives it."""
    launch = launched(environ)
    text = environ.get("LOCAL_RANK", "0")
    return launch.local_rank if launch is not None else int(text) if text.isdigit() else 0


def share_of(total: int, rank: int, world_size: int) -> range:
    """Places within the step of the samples that a rank takes: contiguous and nearly equal parts, all of it taken once.

    Empty for some ranks where there are fewer samples than ranks.
    """
    return range(total * rank // world_size, total * (rank + 1) // world_size)


def largest_share(total: int, world_size: int) -> int:
    """Samples that one rank takes at most."""
    return -(-total // world_size)
