"""Saves what steps change, and restores it: before a repeated step, and after steps that are only tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wellfed import generators
from wellfed.errors import ModelError

LARGE_BYTES = 2**20
"""Bytes beyond which a buffer is copied only when torch has counted a change."""


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, also of a sparse one, for which torch defines no ``nbytes``."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class StepStart:
    """Random generators and buffers as they were when a step began.

    Copies of all buffers would double their memory. So a buffer beyond ``LARGE_BYTES`` that the first step does not
    change (a mask, a table) is copied again only when torch has counted a change. The step that first changes it in
    place can't be undone.
    """

    is_taken = False
    """There is a saved start. Set it to False when a step is over."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = [(module, name) for module in model.modules() for name in module._buffers]
        self._buffers = [_Buffer(module, name) for module, name in named if module._buffers[name] is not None]
        self._generators = generators.GeneratorStates(device)

    def take(self) -> None:
        """Saves the start of a step. Waits for the device only before the second step."""
        self.is_taken = False  # copies may run out of memory themselves
        self._generators.take()
        for buffer in self._buffers:
            buffer.take()
        self.is_taken = True

    def restore(self) -> None:
        """Restores everything to the latest `take`. Does nothing before the first, or if that has failed.

        Raises:
            ModelError: as of `restore_buffers`.
        """
        if self.is_taken:
            self._generators.restore()
            self.restore_buffers()

    def restore_buffers(self) -> None:
        """Restores buffers to the latest `take`.

        Raises:
            ModelError: the step has changed a large buffer that has no copy.
        """
        for buffer in self._buffers:
            buffer.restore()


class _Buffer:
    """A buffer of a module, which another tensor may replace."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._tensor: Tensor | None = None
        self._copy: Tensor | None = None
        self._version = -1
        self._stays: bool | None = None
        """Whether the first step left a large buffer unchanged; None = unknown yet."""

    @torch.no_grad()
    def take(self) -> None:
        tensor = self._module._buffers[self._name]
        if tensor is not None and tensor is self._tensor and tensor._version == self._version:
            if self._stays is None and self._copy is not None and bytes_of(tensor) > LARGE_BYTES:
                # Kernels may change it without torch counting, but torch compares no sparse tensors.
                self._stays = tensor.layout is not torch.strided or torch.equal(tensor, self._copy)
            if self._stays:
                self._copy = None
                return
        else:
            self._stays = None if self._tensor is None else False
        self._tensor, self._copy = tensor, None if tensor is None else tensor.clone()
        self._version = -1 if tensor is None else tensor._version

    @torch.no_grad()
    def restore(self) -> None:
        if self._tensor is not None and self._copy is not None:
            self._tensor.copy_(self._copy)
        elif self._tensor is not None and self._tensor._version != self._version:
            where = f"{type(self._module).__name__}.{self._name}"
            raise ModelError(
                f"The step can't be undone: it changed the buffer {where}, which is over 1 MiB and has no copy, since "
                "the first step left it unchanged. Assign a new tensor instead of changing it in place."
            )
        self._module._buffers[self._name] = self._tensor


@contextmanager
def put_back(module: nn.Module, device: torch.device | None = None, *, only_buffers: bool = False) -> Iterator[None]:
    """Restores weights, buffers, modes and generators on exit. Gradients are lost.

    Args:
        device: the only GPU whose generator is restored; None = all.
    """
    named = chain(() if only_buffers else module.named_parameters(), module.named_buffers())
    before = {name: value.detach().to("cpu", copy=True) for name, value in named if not is_lazy(value)}
    modes = [(part, part.training) for part in module.modules()]
    drawn = generators.state(device)
    module.zero_grad()
    try:
        yield
    finally:
        module.zero_grad()
        with torch.no_grad():
            for name, value in chain(module.named_parameters(), module.named_buffers()):
                if name in before and not is_lazy(value) and before[name].shape == value.shape:
                    value.copy_(before[name])
        for part, mode in modes:
            part.training = mode
        generators.restore(drawn, device)
