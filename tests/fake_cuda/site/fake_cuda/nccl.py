"""A process group "nccl" for the simulated cards: Gloo on the memory of their tensors.

The hosts make a collective at once. On the cards it begins when the last of them has reached it, and takes as long as
Gloo: a card waits there for a slower one, as with NCCL. NCCL's own stream is not modelled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

_driver: Any = None
_Work: Any = getattr(dist, "_Work", object)
_ProcessGroup: Any = getattr(dist, "ProcessGroup", object)  # a torch without distributed has neither


class Done(_Work):
    """A collective that is over."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        devices = [result[0].device] if result and result[0].is_cuda else None
        self._future: Any = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class SimulatedNccl(_ProcessGroup):
    """As ProcessGroupNCCL, for the collectives that DDP and FSDP use."""

    class Options(SimpleNamespace):
        """What ProcessGroupNCCL can be told."""

    supports_splitting = False
    _device_types = (torch.device("cuda"),)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._device: int | None = None
        self._name = ""

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: torch.device) -> SimulatedNccl:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        opts, divides = _sum_instead_of_mean(opts or dist.AllreduceOptions())
        return self._do("allreduce", tensors, opts, result=tensors, divides=divides)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        return self._do("broadcast", tensors, opts or dist.BroadcastOptions(), result=tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Done:
        return self._do("allgather", outputs, inputs, opts or dist.AllgatherOptions(), result=outputs[0])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Done:
        opts, divides = _sum_instead_of_mean(opts or dist.ReduceScatterOptions())
        return self._do("reduce_scatter", outputs, inputs, opts, result=outputs, divides=divides)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        return self._do("_allgather_base", output, tensor, opts or dist.AllgatherOptions(), result=[output])

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        opts, divides = _sum_instead_of_mean(opts or dist.ReduceScatterOptions())
        return self._do("_reduce_scatter_base", output, tensor, opts, result=[output], divides=divides)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done([])

    def _do(self, name: str, *arguments: Any, result: list[torch.Tensor], divides: bool = False) -> Done:
        device = self._check([tensor for argument in arguments for tensor in _tensors(argument)])
        on_host = [_on_host(argument) for argument in arguments]
        own_ns = _driver.reached_ns(device)
        last_ns = torch.tensor([own_ns], device="cpu")
        latest = dist.AllreduceOptions()
        latest.reduceOp = dist.ReduceOp.MAX
        self._gloo.allreduce([last_ns], latest).wait()
        began_ns = time.monotonic_ns()  # all hosts have come: what is left is no waiting
        getattr(self._gloo, name)(*on_host).wait()
        _driver.count_collective(device, own_ns, int(last_ns), time.monotonic_ns() - began_ns)
        if divides:
            for tensor in result:
                tensor.div_(self._size)
        return Done(result)

    def _check(self, tensors: Sequence[torch.Tensor]) -> int:
        """The card of this rank; NCCL wants one a rank.

        Raises:
            RuntimeError: a tensor of the host, or two ranks on one card.
        """
        if any(not tensor.is_cuda for tensor in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        device = tensors[0].get_device()
        if self._device is None:
            self._device = device
            # Visible devices may number them differently; another agent of torchrun stands for another machine.
            node = os.environ.get("GROUP_RANK", "0")
            card = _driver.uuid(device) + ("" if node == "0" else f" of node {node}")
            self._store.set(f"simulated_nccl/{self._rank}", card)
            cards = [self._store.get(f"simulated_nccl/{rank}").decode() for rank in range(self._size)]
            if cards.count(card) > 1:
                raise RuntimeError(f"Duplicate GPU detected : rank {self._rank} is on {card}, all ranks on {cards}")
        return device


def _sum_instead_of_mean(opts: Any) -> tuple[Any, bool]:
    """Gloo has no mean: the options to give it, and whether to divide then."""
    divides = opts.reduceOp == dist.ReduceOp.AVG
    if divides:
        opts.reduceOp = dist.ReduceOp.SUM
    return opts, divides


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _driver.view_for_collective(value, True)
    if isinstance(value, list | tuple):
        return [_on_host(each) for each in value]
    return value


def fill_in(driver: ModuleType) -> None:
    """Make it torch.distributed's "nccl"."""
    global _driver  # noqa: PLW0603  one machine a process
    _driver = driver
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = SimulatedNccl  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)  # NCCL's
