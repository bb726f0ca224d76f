"""Checks whether the started ranks can train together: their number, code and cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class RankFacts:
    """A rank, and the facts that must be the same on all."""

    rank: int
    node: int
    host: str
    commit: str | None = None
    """Commit of its checkout; None = no git checkout."""
    change: str = ""
    """Digest of the uncommitted changes."""
    source: str = ""
    """Digest of the source files."""
    versions: tuple[tuple[str, str], ...] = field(default=())
    """Versions of Python and of the packages for communication."""

    @property
    def where(self) -> str:
        """Name of the rank and its machine, for messages."""
        return f"rank {self.rank} on node {self.node} ({self.host})"


def code_faults(ranks: Sequence[RankFacts]) -> Iterator[Fault]:
    """Yields a fault for the first rank whose code differs from rank 0's.

    Args:
        ranks: one per machine, rank 0 first.
    """
    first, *others = ranks
    way_out = "Let all machines see one folder of the project, or bring it to the same state on each."
    for other in others:
        if other.commit != first.commit:
            commits = [f"commit {one.commit[:10]}" if one.commit else "no checkout of git" for one in (first, other)]
            yield Fault("code", f"{first.where} runs {commits[0]}, {other.where} {commits[1]}.", way_out)
        elif other.change != first.change:
            problem = f"what is not committed differs between {first.where} and {other.where}."
            yield Fault("code", problem, way_out)
        elif other.source != first.source:
            yield Fault("code", f"source files differ between {first.where} and {other.where}.", way_out)
        elif different := [
            (name, version) for name, version in first.versions if (name, version) not in other.versions
        ]:
            name, version = different[0]
            there = dict(other.versions).get(name, "none")
            problem = f"{first.where} has {name} {version}, {other.where} {there}."
            yield Fault("code", problem, "Install the same versions on all machines: constraints.txt has them.")
        else:
            continue
        return


@dataclass(frozen=True)
class NodeCards:
    """Training devices of a machine."""

    node: int
    host: str
    accelerator: str
    cards: tuple[tuple[str, float | None], ...]
    """Name and memory (GiB) of each; empty for a CPU."""


def card_faults(nodes: Sequence[NodeCards]) -> Iterator[Fault]:
    """Yields a fault for the first machine whose cards differ from machine 0's."""
    first, *others = nodes
    for other in others:
        if other.accelerator != first.accelerator:
            has = {"cpu": "none that torch can use"}
            problem = (
                f"node {first.node} ({first.host}) trains on {has.get(first.accelerator, 'its GPUs')}, "
                f"node {other.node} ({other.host}) on {has.get(other.accelerator, 'its GPUs')}."
            )
            yield Fault("cards", problem, "Set trainer.accelerator=cpu, or leave that machine out.")
            return
        if _shown(other) != _shown(first):
            problem = (
                f"node {first.node} ({first.host}) has {_shown(first)}, node {other.node} ({other.host}) has "
                f"{_shown(other)}: each step would wait for the slowest, and the plan is made for one kind."
            )
            yield Fault("cards", problem, "Take machines with the same cards, or leave that one out.")
            return


def _shown(node: NodeCards) -> str:
    kinds = [name if size is None else f"{name} ({size:.0f} GiB)" for name, size in node.cards]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "no GPU"
