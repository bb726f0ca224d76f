"""Makes a pass on CPU tensors keep the same tensors as a pass on CUDA, for the kernels where the two differ most."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from wellfed.plan.predict import rnn_reserve


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Emulates CUDA's dropout mask of bytes, its fused attention kernel, and cuDNN's RNNs.

    Run the backward pass by `backward`. The oneDNN switch is global, so it applies to other threads too.
    """
    was_enabled = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags would also call Intel's GPUs about TF32
    torch._C._set_mkldnn_enabled(False)
    try:
        with _Functions():
            yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def backward(loss: Tensor) -> None:
    """Runs the backward pass within the torch function mode.

    ``loss.backward()`` would leave the mode, so that recomputed blocks would differ.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.dropout:
            return _dropout(*args, **named)
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        if func is functional.multi_head_attention_forward:  # it hides the attention
            bound = inspect.signature(func).bind(*args, **named)
            bound.arguments["dropout_p"] = 0.0
            return func(*bound.args, **bound.kwargs)
        if func in rnn_reserve.RESERVED and not named:
            return _rnn(func, *args)
        return func(*args, **named)


def _rnn(func: Callable[..., Any], *args: Any) -> Any:
    """Runs an RNN entirely in the lower type under autocast (aten/src/ATen/cudnn/AutocastRNN.cpp)."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        with torch.autocast("cpu", enabled=False):
            return _rnn(func, *tree_map(cast, args))
    return rnn_reserve.run(func, *args) if rnn_reserve.is_known(*args) else func(*args)


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
