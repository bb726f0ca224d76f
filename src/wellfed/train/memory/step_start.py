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
"""Bytes beyond which a buffer that the first step leaves unchanged is not copied again until a step changes it."""


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, also of a sparse one, for which torch defines no ``nbytes``."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class StepStart:
    """Torch's random generators and buffers as they were when a step began.

    Copies of all buffers would double their memory. So a buffer beyond ``LARGE_BYTES`` that the first step does not
    change (a mask, a table) is copied again only once torch has counted a change. The step that first changes it in
    place can't be undone. Generators of numpy and Python are left out: reading both takes 50 us, and a loss rarely
    draws from them.
    """

    is_taken = False
    """There is a saved start. Set it to False when a step is over."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = [(module, name) for module in model.modules() for name in module._buffers]
        self._buffers = [(module, name) for module, name in named if module._buffers[name] is not None]
        self._saved: dict[tuple[nn.Module, str], tuple[Tensor | None, int, Tensor | None]] = {}
        """Buffer -> tensor, its version and a copy of it."""
        self._changing: set[tuple[nn.Module, str]] = set()
        """Large buffers that a step has changed."""
        self._has_begun = False
        """The first step has begun."""
        self._device = device if device.type == "cuda" else None
        self._drawn: list[Tensor] = []
        """States of torch's generators, of the CPU and of the GPU."""

    @torch.no_grad()
    def take(self) -> None:
        """Saves the start of a step. Waits for the device only before the second step."""
        self.is_taken = False  # copies may run out of memory themselves
        if not self._has_begun:
            self._saved.clear()
        self._drawn = [torch.default_generator.get_state()]
        if self._device is not None:
            self._drawn.append(torch.cuda.get_rng_state(self._device))
        for key in self._buffers:
            tensor = key[0]._buffers[key[1]]
            before = self._saved.get(key)
            if tensor is None or bytes_of(tensor) <= LARGE_BYTES:
                has_copy = tensor is not None
            else:
                if before is not None and _is_changed(tensor, *before):
                    self._changing.add(key)
                has_copy = before is None or key in self._changing
            self._saved[key] = tensor, _version(tensor), tensor.clone() if tensor is not None and has_copy else None
        self.is_taken = self._has_begun = True

    def restore(self) -> None:
        """Restores everything to the latest `take`. Does nothing before the first, or if that has failed.

        Raises:
            ModelError: as of `restore_buffers`.
        """
        if self.is_taken:
            torch.default_generator.set_state(self._drawn[0])
            if self._device is not None:
                torch.cuda.set_rng_state(self._drawn[1], self._device)
            self.restore_buffers()
            for key, (tensor, _, copy) in self._saved.items():  # the step is made again: its changes are still to come
                self._saved[key] = tensor, _version(tensor), copy

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restores buffers to the latest `take`.

        Raises:
            ModelError: the step has changed a large buffer that has no copy.
        """
        for (module, name), (tensor, version, copy) in self._saved.items():
            module._buffers[name] = tensor
            if tensor is not None and copy is not None:
                tensor.copy_(copy)
            elif _version(tensor) != version:
                where = f"{type(module).__name__}.{name}"
                raise ModelError(
                    f"The step can't be undone: it changed the buffer {where}, which is over 1 MiB and has no copy, "
                    "since the first step left it unchanged. Assign a new tensor instead of changing it in place."
                )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _is_changed(tensor: Tensor, before: Tensor | None, version: int, copy: Tensor | None) -> bool:
    """Returns whether a step has changed a buffer, also through ``.data``, which torch does not count."""
    if before is not tensor or tensor._version != version:
        return True
    return copy is not None and tensor.layout is torch.strided and not torch.equal(tensor, copy)


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
