"""Checks whether as many ranks were started as the configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator

from wellfed.config.schema import TrainerConfig
from wellfed.errors import Fault
from wellfed.ranks import Launch
from wellfed.units import counted


def launch_faults(trainer: TrainerConfig, launch: Launch | None) -> Iterator[Fault]:
    """Yields a fault if the number of started machines or devices differs from the configuration."""
    nodes, devices = trainer.num_nodes, trainer.devices
    if launch is None:
        if nodes > 1:
            yield Fault(
                f"trainer.num_nodes={nodes}",
                "this process was started alone: nobody starts the ranks of the other machines.",
                f"Start it on each of them: torchrun --nnodes={nodes} --nproc-per-node={devices} "
                "--rdzv-backend=c10d --rdzv-endpoint=<first machine>:29500 src/train.py ...; or by srun.",
            )
        return
    if (launch.num_nodes, launch.devices, launch.world_size) == (nodes, devices, trainer.world_size):
        return
    started = f"{launch.num_nodes} x {launch.devices}"
    per_node = "--nproc-per-node" if launch.by == "torchrun" else "--ntasks-per-node"
    nnodes = "--nnodes" if launch.by == "torchrun" else "--nodes"
    as_started = f"trainer.num_nodes={launch.num_nodes} trainer.devices={launch.devices}"
    if launch.num_nodes * launch.devices != launch.world_size:  # machines differ in their number of ranks
        started, as_started = f"not equally many on each of {launch.num_nodes}", ""
    way_out = f"start it with {nnodes}={nodes} {per_node}={devices}."
    yield Fault(
        f"trainer.num_nodes={nodes}",
        f"with trainer.devices={devices} these are {counted(trainer.world_size, 'rank')} ({nodes} x {devices}), and "
        f"{launch.by} has started {launch.world_size} ({started}).",
        f"Set {as_started}, or {way_out}" if as_started else way_out.capitalize(),
    )
