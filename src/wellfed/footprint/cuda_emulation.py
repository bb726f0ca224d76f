"""Makes a pass on CPU tensors keep what a pass on CUDA tensors would keep, where the two differ.

A small table of predictions about kernels. What it lacks: cuDNN's workspaces, and its RNN's reserve, for which the
steps of the RNN stand, one by one.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from wellfed.footprint.cuda_autocast import cast, cuda_autocast_lists
from wellfed.footprint.in_place import bias_in_place

_RNN = "gru lstm rnn_relu rnn_tanh"
"""cuDNN's are run in the lower type as a whole (aten/src/ATen/cudnn/AutocastRNN.cpp)."""


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(torch, name) for name in names.split())


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Dropout with a mask of bytes, attention's fused kernel, CUDA's autocast lists, RNNs without oneDNN.

    Run the backward pass by `backward`. A process has one switch for oneDNN, and one set of lists: they hold for its
    other threads too meanwhile.
    """
    with warnings.catch_warnings(action="ignore"):  # the switch asks about TF32 on Intel's GPUs
        flags = torch.backends.mkldnn.flags(enabled=False)
        flags.__enter__()
    try:
        with _Kernels(), cuda_autocast_lists(), bias_in_place():
            yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            flags.__exit__(None, None, None)


def backward(loss: Tensor) -> None:
    """As ``loss.backward()``, which leaves a torch function mode while it runs: checkpointed blocks would then do
    something else the second time."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Kernels(TorchFunctionMode):
    rnn = _functions(_RNN)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.dropout:
            return _dropout(*args, **named)
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        if func is functional.multi_head_attention_forward:  # hides the attention inside it
            bound = _MULTI_HEAD.bind(*args, **named)
            bound.arguments["dropout_p"] = 0.0
            return func(*bound.args, **bound.kwargs)
        if func in self.rnn and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            with torch.autocast("cpu", enabled=False):
                return func(*cast(args, dtype), **cast(named, dtype))
        return func(*args, **named)


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The CPU's keeps a mask of the input's type."""
    if not training or p == 0 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **named: Any
) -> Tensor:
    """A fused kernel draws its dropout without a mask; the CPU has such a kernel only without dropout."""
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **named)
