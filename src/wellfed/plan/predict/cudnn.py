"""Predicts memory that cuDNN uses beside tensors: of RNNs, and of convolutions in two dimensions.

The sizes are undocumented. The formulas are fitted to calls with cuDNN 9.19 on an H200
(`benchmarks/records/2026-11-26_cudnn_h200.json`).

RNNs: cuDNN runs all layers in one call. It keeps a reserve from the forward to the backward pass, and uses a workspace
in both. `run` replaces torch's RNNs by a pass that makes these tensors; its values are zeros. The reserve is exact in
all 66 calls.

Convolutions on tensor cores (bf16, fp16, TF32): the kernels want channels last, so inputs and results in torch's usual
order are copied into a workspace. Float32 is taken for TF32. Without TF32 other kernels run, whose workspaces were
between none and nine times the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellfed.units import MIB

aten = torch.ops.aten
RESERVED = {torch.lstm: 5, torch.gru: 6, torch.rnn_tanh: 1, torch.rnn_relu: 1}
"""Numbers that a layer and direction keep per value of the state and time step."""
_PLAIN = (13.2, 2.3, 512, 3.7)
WORKSPACE = {
    torch.lstm: (21.4, 0.9, 256, 5.7),
    torch.gru: (18.2, 2.3, 256, 4.5),
    torch.rnn_tanh: _PLAIN,
    torch.rnn_relu: _PLAIN,
}
"""Numbers of a pass per value of a layer's output and per value of the widest layer's input, while the state is narrow;
the least size of a wide state, and the numbers per value of its output."""
BOTH_WAYS = 0.74
"""Factor of two directions, which share a part."""
LAYER_BYTES = round(8.1 * MIB)
"""Bytes of a pass that each layer and direction adds, whatever the batch."""
_MATRICES = 4
"""Weights and biases of a layer and direction; an LSTM with projections has one more."""


@dataclass(frozen=True)
class Call:
    """The sizes of a call of torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu."""

    function: Callable[..., Any]
    output: tuple[int, ...]
    """Shape of the result: [B, T, D * H], [T, B, D * H], or [rows, D * H] if packed."""
    num_layers: int
    num_directions: int
    input_size: int
    """Values of a time step's input per sample."""
    size: int
    """Values of a layer's state per sample (H)."""
    drops: bool
    """Whether values are dropped between the layers."""
    transposed: bool
    """Whether the batch comes first; cuDNN gets a copy with the time first."""

    @property
    def values(self) -> int:
        """Number of values of the output in one direction: time steps x samples x H."""
        return torch.Size(self.output).numel() // self.num_directions

    def reserve(self, value_bytes: int) -> int:
        """Returns the bytes that are kept for the backward pass."""
        cells = self.num_layers * self.num_directions
        between = (self.num_layers - 1) * self.num_directions * self.values
        kept = cells * RESERVED[self.function] * self.values + between
        return kept * value_bytes + (between // 8 if self.drops else 0) + 256

    def workspace(self, value_bytes: int) -> int:
        """Returns the bytes of a pass's workspace."""
        narrow, inputs, wide_size, wide = WORKSPACE[self.function]
        cells, values = self.num_layers * self.num_directions, float(self.values * self.num_directions)
        if self.size < wide_size:
            widest = max(self.input_size, self.size if self.num_layers > 1 else 0)
            values *= (narrow + inputs * widest / self.size) * (BOTH_WAYS if self.num_directions > 1 else 1.0)
        else:
            values *= wide
        return cells * LAYER_BYTES + round(values * value_bytes)


def is_known(*args: Any) -> bool:
    """Whether the formulas hold for a call: an RNN with biases and without projections."""
    _, states, weights, _ = _parts(args)
    return len(weights) == _MATRICES * states[0].shape[0]


def _parts(args: Sequence[Any]) -> tuple[Tensor, list[Tensor], Sequence[Tensor], Sequence[Any]]:
    """Returns input, states, weights and options of a call, whose input may be packed."""
    is_packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()  # batch sizes
    input, hidden, weights, options = (args[0], args[2], args[3], args[4:]) if is_packed else (*args[:3], args[3:])
    return input, list(hidden) if isinstance(hidden, (list, tuple)) else [hidden], weights, options


def run(function: Callable[..., Any], *args: Any, workspaces: bool) -> Any:
    """Returns tensors of the shapes of ``function(*args)``; gradients flow to the input, the state and the weights."""
    input, states, weights, (_, num_layers, dropout, train, is_bidirectional, *more) = _parts(args)
    size = states[0].shape[-1]
    directions = 2 if is_bidirectional else 1
    call = Call(
        function,
        (*input.shape[:-1], directions * size),
        num_layers,
        directions,
        input.shape[-1],
        size,
        drops=bool(train and dropout),
        transposed=bool(more and more[0]),
    )
    return _Rnn.apply(call, train, workspaces, len(states), input, *states, *weights)  # type: ignore[no-untyped-call]


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, train: bool, workspaces: bool, num_states: int, input: Tensor, *others: Tensor
    ) -> Any:
        states = others[:num_states]
        copy = input.clone() if call.transposed else None
        output = input.new_zeros(call.output)
        after = [torch.zeros_like(state) for state in states]
        value_bytes = input.element_size()
        reserve = _bytes(input, call.reserve(value_bytes) if train else 0)
        workspace = _bytes(input, call.workspace(value_bytes) if workspaces else 0)
        del workspace, copy
        ctx.call, ctx.workspaces = call, workspaces
        ctx.save_for_backward(reserve, output, input, *others)
        return output, *after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, _, input, *others = ctx.saved_tensors
        copies = [gradients[0].clone(), input.clone()] if ctx.call.transposed else []
        found = [torch.zeros_like(each) for each in (input, *others)]
        workspace = _bytes(input, ctx.call.workspace(input.element_size()) if ctx.workspaces else 0)
        del workspace, copies
        return None, None, None, None, *found


def _bytes(like: Tensor, num_bytes: int) -> Tensor:
    return like.new_empty(num_bytes, dtype=torch.uint8)


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
