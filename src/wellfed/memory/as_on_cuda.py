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

_FLOAT32 = (
    "__pow__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss "
    "cosine_similarity cross_entropy dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm "
    "log log10 log1p log2 margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm "
    "normalize pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmin "
    "softplus tan triplet_margin_loss"
)
"""CUDA's autocast turns their inputs to float32, the CPU's leaves them
(https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32")."""
_FLOAT32_RESULT = "cumprod cumsum log_softmax prod softmax sum"
"""The same list, but the kernel reads what it is given and gives float32
(fp32_set_opt_dtype in aten/src/ATen/autocast_mode.h)."""
_RNN = "gru lstm rnn_relu rnn_tanh"
"""cuDNN's are run in the lower type as a whole (aten/src/ATen/cudnn/AutocastRNN.cpp)."""


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    homes = (torch, Tensor, functional)
    found = (getattr(home, name, None) for home in homes for name in names.split())
    return frozenset(each for each in found if each is not None)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Dropout with a mask of bytes, attention's fused kernel, CUDA's autocast list, RNNs without oneDNN.

    Run the backward pass by `backward`. A process has one switch for oneDNN: other threads go without it meanwhile.
    """
    with warnings.catch_warnings(action="ignore"):  # the switch asks about TF32 on Intel's GPUs
        flags = torch.backends.mkldnn.flags(enabled=False)
        flags.__enter__()
    try:
        with _Kernels():
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
    float32, float32_result, rnn = _functions(_FLOAT32), _functions(_FLOAT32_RESULT), _functions(_RNN)

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
        if torch.is_autocast_enabled("cpu"):
            if func in self.float32:
                return func(*_cast(args, torch.float32), **_cast(named, torch.float32))
            if func in self.float32_result and _is_low(args[0]) and named.get("dtype") is None:
                return func(*args, **{**named, "dtype": torch.float32})
            if func in self.rnn:
                dtype = torch.get_autocast_dtype("cpu")
                with torch.autocast("cpu", enabled=False):
                    return func(*_cast(args, dtype), **_cast(named, dtype))
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


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of float types in nested arguments."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return value
