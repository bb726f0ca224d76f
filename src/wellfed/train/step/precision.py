"""Applies ``gpu.precision`` to a step: types of weights and inputs, autocast, scaled gradients; and backend flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Precision:
    """Types, autocast and scaler of a ``gpu.precision``. The scaler keeps small gradients, which fp16 would lose."""

    def __init__(self, name: str, device_type: str, scaler: torch.amp.GradScaler | None = None) -> None:
        self.name, self.scaler = name, scaler
        self.dtype = torch.bfloat16 if name == "bf16-true" else None
        """Type of weights and inputs; None = unchanged."""
        # Without the cache, cast weights are freed after each use, not at the end of the forward pass.
        autocast = _AUTOCAST.get(name)
        made = nullcontext() if autocast is None else torch.autocast(device_type, autocast, cache_enabled=False)
        self._forward: AbstractContextManager[Any] = made

    @classmethod
    def for_training(cls, name: str, device_type: str) -> Precision:
        """Returns a precision with its own scaler if gradients are fp16."""
        return cls(name, device_type, torch.amp.GradScaler(device_type) if name == "16-mixed" else None)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Returns the type of a weight or an input in a step."""
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def convert(self, model: nn.Module) -> nn.Module:
        """Converts the weights of a model to the type of the precision."""
        return model if self.dtype is None else model.to(self.dtype)

    def forward(self) -> AbstractContextManager[Any]:
        """Returns a context for the forward pass."""
        return self._forward if self.dtype is None else _default_dtype(self.dtype)


def set_backend_flags(*, tf32: bool, cudnn_benchmark: bool, on_gpu: bool) -> None:
    """Sets TF32 and cuDNN by the older API, which Lightning reads. torch 2.13 raises if both APIs are used."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if on_gpu:
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = cudnn_benchmark


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
