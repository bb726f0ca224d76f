"""Makes a pass on CPU tensors keep about the tensors that a pass on CUDA keeps, where the two differ much.

Fake tensors on device "cuda" would need no emulation, but a build of torch without CUDA aborts in their backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from wellfed.plan.predict import rnn_reserve

_OPERATORS = ("pow", "exp", "log", "rsqrt", "reciprocal", "softmax", "log_softmax", "cumsum")
FLOAT32 = {
    *(getattr(owner, name) for owner in (torch, Tensor) for name in _OPERATORS),
    *(functional.layer_norm, functional.group_norm, functional.rms_norm),
    *(functional.softmax, functional.log_softmax, functional.softplus, Tensor.__pow__),
}
"""Functions that CUDA's autocast runs in float32, and the CPU's in the lower type. Those whose results are large."""


class AsOnCuda(TorchFunctionMode):
    """Emulates CUDA's dropout masks, fused attention, types under autocast, and cuDNN's RNNs.

    Run the backward pass by `backward`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, has_autocast = dict(kwargs or {}), torch.is_autocast_enabled("cpu")
        if func is functional.dropout:
            return _dropout(*args, **named)
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        if func is functional.multi_head_attention_forward:  # it hides the attention
            bound = inspect.signature(func).bind(*args, **named)
            bound.arguments["dropout_p"] = 0.0
            return func(*bound.args, **bound.kwargs)
        if func in rnn_reserve.RESERVED and not named and rnn_reserve.is_known(*args):
            # cuDNN runs the whole RNN in the lower type (aten/src/ATen/cudnn/AutocastRNN.cpp).
            lower = torch.get_autocast_dtype("cpu") if has_autocast else None
            return rnn_reserve.run(func, *_cast(args, lower))
        if has_autocast and func in FLOAT32:
            with torch.autocast("cpu", enabled=False):
                named = {name: _cast(value, torch.float32) for name, value in named.items()}
                return func(*_cast(args, torch.float32), **named)
        if has_autocast and func is functional.cross_entropy:
            return _cross_entropy(*args, **named)
        return func(*args, **named)


def backward(loss: Tensor) -> None:
    """Runs the backward pass within the mode, which ``loss.backward()`` would leave: recomputed blocks would differ."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keeps a mask of bytes, as on CUDA; the CPU's kernel keeps one of the input's type."""
    if not training or p == 0 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
) -> Tensor:
    """Runs the fused kernel without dropout. On CUDA it needs no mask, and the CPU's supports no dropout."""
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *more, **named)


def _cross_entropy(input: Tensor, target: Tensor, **named: Any) -> Tensor:
    """Keeps log-probabilities in the input's type and once more in float32, as on CUDA."""
    if named.get("label_smoothing") or target.is_floating_point():
        return functional.cross_entropy(input, target, **named)
    with torch.autocast("cpu", enabled=False):
        named.pop("label_smoothing", None)
        return functional.nll_loss(functional.log_softmax(input, 1).float(), target, **named)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Casts float tensors in nested arguments, except float64; None = leaves them."""
    if isinstance(value, Tensor):
        is_eligible = dtype is not None and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if is_eligible else value
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, (tuple, list)) else value
