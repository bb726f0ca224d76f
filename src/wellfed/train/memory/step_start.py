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
"""Bytes beyond which a buffer has no copy."""


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, also of a sparse one, for which torch defines no ``nbytes``."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class StepStart:
    """Torch's random generators and buffers as they were when a step began.

    Large buffers, mostly masks and tables, have no copy: a step that changes one in place can't be undone. Generators
    of numpy and Python are left out: reading both takes 50 us, and a loss rarely draws from them.
    """

    is_taken = False
    """There is a saved start. Set it to False when a step is over."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = [(module, *one) for module in model.modules() for one in module._buffers.items()]
        self._buffers = [(module, name, bytes_of(one) > LARGE_BYTES) for module, name, one in named if one is not None]
        """Module and name of a buffer, and whether it is large."""
        self._saved: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = []
        """Module and name of a buffer, its tensor, the version of that, and a copy unless it is large."""
        self._device = device if device.type == "cuda" else None
        self._drawn: list[Tensor] = []
        """States of torch's generators, of the CPU and of the GPU."""

    @torch.no_grad()
    def take(self) -> None:
        """Saves the start of a step."""
        self.is_taken = False  # copies may run out of memory themselves
        self._saved = []  # frees the copies
        self._drawn = [torch.default_generator.get_state()]
        if self._device is not None:
            self._drawn.append(torch.cuda.get_rng_state(self._device))
        for module, name, is_large in self._buffers:
            tensor = module._buffers[name]
            if tensor is not None:
                self._saved.append((module, name, tensor, tensor._version, None if is_large else tensor.clone()))
        self.is_taken = True

    @torch.no_grad()
    def restore(self, *, repeats: bool) -> None:
        """Restores buffers to the latest `take`, and generators if the step is repeated.

        Does nothing before the first `take`, or if that has failed.

        Raises:
            ModelError: the step has changed a large buffer.
        """
        if not self.is_taken:
            return
        if repeats:
            torch.default_generator.set_state(self._drawn[0])
            if self._device is not None:
                torch.cuda.set_rng_state(self._drawn[1], self._device)
        for module, name, tensor, version, copy in self._saved:
            module._buffers[name] = tensor
            if copy is not None:
                tensor.copy_(copy)
            elif tensor._version != version:
                raise ModelError(
                    f"The step can't be undone: it changed the buffer {type(module).__name__}.{name}, which is over 1 "
                    "MiB and has no copy. Assign a new tensor instead of changing it in place."
                )


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
                if name in before and before[name].shape == value.shape:
                    value.copy_(before[name])
        for part, mode in modes:
            part.training = mode
        generators.restore(drawn, device)
