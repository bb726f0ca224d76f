"""Replaces torch's RNNs by a pass that makes the tensors of cuDNN's, for the count of bytes. Values are zeros.

cuDNN runs all layers in one call. It keeps a reserve from the forward to the backward pass, and uses a workspace in
both. Their sizes are undocumented: the formulas are fitted to 66 calls with cuDNN 9.19 on an H200. The reserve is exact
in all of them (`benchmarks/records/2026-11-26_cudnn_h200.json`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellfed.units import MIB

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
