"""Predicts the memory that cuDNN's RNNs keep from the forward to the backward pass.

cuDNN runs all layers in one call. `run` replaces torch's RNNs by a pass that makes the same tensors; its values are
zeros. The sizes are undocumented: the formula is fitted to calls with cuDNN 9.19 on an H200, and exact in all 66 of
them (`benchmarks/records/2026-11-26_cudnn_h200.json`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RESERVED = {torch.lstm: 5, torch.gru: 6, torch.rnn_tanh: 1, torch.rnn_relu: 1}
"""Numbers that a layer and direction keep per value of the state and time step."""
_MATRICES = 4
"""Weights and biases of a layer and direction; an LSTM with projections has one more."""


def is_known(*args: Any) -> bool:
    """Returns whether the formula holds for a call: an RNN with biases and without projections."""
    _, states, weights, _ = _parts(args)
    return len(weights) == _MATRICES * states[0].shape[0]


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Returns tensors of the shapes of ``function(*args)``; gradients flow to the input, the state and the weights."""
    input, states, weights, (_, num_layers, dropout, train, is_bidirectional, *_) = _parts(args)
    directions, size = 2 if is_bidirectional else 1, states[0].shape[-1]
    shape = (*input.shape[:-1], directions * size)
    values = torch.Size(shape).numel() // directions
    between = (num_layers - 1) * directions * values
    kept = (num_layers * directions * RESERVED[function] * values + between) * input.element_size()
    reserve = kept + (between // 8 if train and dropout else 0) + 256 if train else 0
    return _Rnn.apply(shape, reserve, len(states), input, *states, *weights)  # type: ignore[no-untyped-call]


def _parts(args: Sequence[Any]) -> tuple[Tensor, list[Tensor], Sequence[Tensor], Sequence[Any]]:
    """Returns input, states, weights and options of a call, whose input may be packed."""
    is_packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()  # batch sizes
    input, hidden, weights, options = (args[0], args[2], args[3], args[4:]) if is_packed else (*args[:3], args[3:])
    return input, list(hidden) if isinstance(hidden, (list, tuple)) else [hidden], weights, options


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], reserve: int, num_states: int, input: Tensor, *others: Tensor) -> Any:
        output = input.new_zeros(shape)
        after = [torch.zeros_like(state) for state in others[:num_states]]
        ctx.save_for_backward(input.new_empty(reserve, dtype=torch.uint8), output, input, *others)
        return output, *after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, _, *inputs = ctx.saved_tensors
        return None, None, None, *(torch.zeros_like(each) for each in inputs)
