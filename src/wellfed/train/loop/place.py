"""Starts the processes of a training and chooses their devices, by Lightning's Fabric."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from wellfed.ranks import COLLECTIVE_TIMEOUT_S

Told = TypeVar("Told")


class Whole(nn.Module):
    """A plain model within DDP, whose forward calls any function. Names in checkpoints begin with ``model.``"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``call(*arguments)``."""
        return call(*arguments)


@dataclass
class Place:
    """Where a model is trained: the device of this process, and the other ranks. All ranks must call each method
    alike."""

    accelerator: Literal["cpu", "gpu"] = "cpu"
    devices: int = 1
    num_nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """A plain model has DDP on several ranks; ``fsdp`` is Lightning's."""
    precision: str = "32-true"
    deterministic: bool = False
    device: torch.device = field(init=False)
    """The device of this rank; known after `begin`."""
    rank: int = field(init=False)
    """Number of this rank, from 0; known after `begin`."""

    @property
    def size(self) -> int:
        """Number of ranks, one for each device."""
        return self.num_nodes * self.devices

    def begin(self) -> None:
        """Starts the other ranks of this machine unless a launcher has, and meets all of them."""
        # Notes of Fabric, and a warning of torch that does not apply here.
        for name in ("lightning.fabric", "lightning"):
            logging.getLogger(name).setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\).*before.*optimizer.step.*")
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self._fabric = Fabric(
            accelerator=self.accelerator,
            devices=self.devices,
            num_nodes=self.num_nodes,
            strategy=DDPStrategy(timeout=timeout, find_unused_parameters=True) if self.size > 1 else "auto",
        )
        self._fabric.launch()
        self.device, self.rank = self._fabric.device, self._fabric.global_rank
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    def wrap(self, module: Whole) -> nn.Module:
        """Moves a module to the device; returns it, or its DDP."""
        strategy: Any = self._fabric.strategy
        strategy.module_to_device(module)
        wrapper: nn.Module = strategy.setup_module(module)
        if self.device.type == "cuda" and self.size > 1:
            # DDP is made on another stream, where it sends the weights of rank 0. A step must not begin before that.
            torch.cuda.synchronize(self.device)
        return wrapper

    def broadcast(self, own: Told) -> Told:
        """Returns the object of rank 0."""
        return own if self.size == 1 else self._fabric.broadcast(own)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Returns for each flag whether it is set on any rank. Waits for the device if there are several ranks."""
        if self.size == 1:
            return list(flags)
        found = torch.tensor([float(flag) for flag in flags], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [value > 0 for value in found.tolist()]

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean of a tensor over all ranks."""
        values = values.to(self.device)  # sums of a checkpoint lie on the CPU, where NCCL can't reduce them
        dist.all_reduce(values)
        return values / self.size

    def gather(self, own: Told) -> list[Told]:
        """Returns the objects of all ranks, in their order."""
        if self.size == 1:
            return [own]
        given: list[Any] = [None] * self.size
        dist.all_gather_object(given, own)
        return given

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Gives all ranks the tensors of rank 0, in place."""
        for tensor in tensors if self.size > 1 else ():
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, 0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(sent)


def own_command() -> list[str]:
    """Returns the command of this process, as Fabric starts the other ranks with it."""
    from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd

    return list(_basic_subprocess_cmd())


def meeting_place(by: Literal["torchrun", "srun", "Lightning"]) -> tuple[str, int]:
    """Returns host and port of rank 0's store; sets ``MASTER_ADDR`` and ``MASTER_PORT`` under Slurm."""
    environment = TorchElasticEnvironment() if by == "torchrun" else SLURMEnvironment()
    return environment.main_address, environment.main_port
