"""Predicts the workspaces of cuDNN's convolutions in two dimensions on tensor cores (bf16, fp16, TF32).

Its kernels there want channels last, so that inputs and results in torch's usual order are copied into a workspace. The
sizes are fitted to calls with cuDNN 9.19 on an H200 (`benchmarks/records/2026-11-26_cudnn_h200.json`). Float32 is
taken for TF32. Without TF32 other kernels run, whose workspaces were between none and nine times the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellfed.units import MIB

aten = torch.ops.aten
FEWEST_CHANNELS = 32
"""Minimum channels of a result; convolutions to fewer take kernels without a workspace."""
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
PADDED_CHANNELS = 8
"""Channels of copies in 16 bits are padded to a multiple."""
SPLITS, MOST_SPLIT_BYTES = 16, {4: 12 * MIB, 2: 3 * MIB}
"""The gradient of the weights is a sum over so many parts in float32, together at most so many bytes by the bytes of an
input's value."""


def workspace_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Returns the bytes that an operator used for this result; 0 for all but these convolutions."""
    if func is aten.convolution.default:
        input, weight, transposed, groups = *args[:2], args[6], args[8]
        if not _is_copied(input, weight, transposed, groups):
            return 0
        return _padded(input) + _padded(weight) + int(result.nbytes)
    if func is aten.convolution_backward.default:
        gradient, input, weight, transposed, groups = *args[:3], args[7], args[9]
        if not _is_copied(input, weight, transposed, groups):
            return 0
        splits = min(SPLITS * weight.numel() * 4, MOST_SPLIT_BYTES.get(input.element_size(), 0))
        num_bytes: int = gradient.nbytes
        return num_bytes + _padded(input) + int(max(_padded(weight), splits))
    return 0


def _is_copied(input: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return (
        input.dim() == 4
        and input.dtype in _TYPES
        and not transposed
        and groups == 1
        and weight.shape[0] >= FEWEST_CHANNELS
        and weight.shape[2:].numel() > 1
        and not input.is_contiguous(memory_format=torch.channels_last)
    )


def _padded(tensor: Tensor) -> int:
    """Returns the bytes of a copy with its channels last."""
    channels = tensor.shape[1]
    if tensor.element_size() == 2:
        channels = -(-channels // PADDED_CHANNELS) * PADDED_CHANNELS
    return tensor.nbytes // tensor.shape[1] * channels
