"""Identifies this process within its run (rank, node, launcher), and its share of the samples of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

COLLECTIVE_TIMEOUT_S = 600.0
"""Seconds that a torch collective waits for a rank. After it the rank counts as hanging, and all others end."""
INVITATION = "WELLFED_RANK_0"
"""Environment variable of ranks started by Lightning: port of rank 0's store, and number of ranks."""


@dataclass(frozen=True)
class Launch:
    """The ranks that a launcher has started on all machines, and this process among them."""

    by: Literal["torchrun", "srun", "Lightning"]
    rank: int
    local_rank: int
    """Number among the ranks of this machine."""
    node: int
    """Number of this machine."""
    world_size: int
    num_nodes: int
    devices: int
    """Ranks on this machine."""
    job: str | None = None
    """Name of the job, the same after a restart; None = unnamed."""
    attempt: int = 0
    """Times that the job was started before."""

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank does the work needed once per machine."""
        return self.local_rank == 0


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns the launch by torchrun or srun; None without either. torchrun within srun counts as torchrun."""

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
            job=None if name in ("", "none") else f"torchrun {name}",  # torchrun writes "none" without --rdzv-id
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        )
    # An interactive shell within a job has the job's variables, but was not started by srun.
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


def lightnings_launch(rank: int, world_size: int) -> Launch:
    """Returns the launch of ranks that Lightning starts on this machine when rank 0 begins to train."""
    return Launch("Lightning", rank, local_rank=rank, node=0, world_size=world_size, num_nodes=1, devices=world_size)


def requeue(environ: Mapping[str, str] = os.environ) -> str | None:
    """Requeues this Slurm job (`scontrol requeue`). Returns why it failed; None on success or without srun."""
    launch = launched(environ)
    if launch is None or launch.by != "srun" or launch.job is None:
        return None
    import subprocess

    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"scontrol requeue {job}: {getattr(error, 'stderr', None) or error}"
    return None


def is_one_of_many(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process was started beside other ranks, by torchrun, srun or Lightning."""
    launch = launched(environ)
    return INVITATION in environ or (launch is not None and launch.world_size > 1)


def own_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank of this process under any launcher; 0 if the environment has none."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def own_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the rank within this machine: the index of the GPU that Lightning assigns."""
    launch = launched(environ)
    text = environ.get("LOCAL_RANK", "0")
    return launch.local_rank if launch is not None else int(text) if text.isdigit() else 0


def gpu_label(node: int, gpu: int) -> str:
    """Returns a GPU as reports name it: its number on the run's first machine, else with its node: ``node1/0``."""
    return f"node{node}/{gpu}" if node else str(gpu)


def share_of(total: int, rank: int, world_size: int) -> range:
    """Returns the positions, within a step, of the samples that a rank takes.

    Shares are contiguous and nearly equal; some are empty with fewer samples than ranks.
    """
    return range(total * rank // world_size, total * (rank + 1) // world_size)


def largest_share(total: int, world_size: int) -> int:
    """Returns the largest number of samples that a rank takes."""
    return -(-total // world_size)
