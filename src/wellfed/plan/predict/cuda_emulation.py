"""Makes a pass on CPU tensors keep the same tensors as a pass on CUDA, where the two differ.

This covers a small table of kernels. RNNs are those of `rnn_reserve`. The lists of autocast follow
aten/src/ATen/autocast_mode.h (torch 2.13); a test compares them with torch's registered operators.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from wellfed.plan.predict import rnn_reserve

KEY = "AutocastCPU"
LOWER = (
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution "
    "cudnn_convolution_transpose"
)
"""Operators whose inputs are cast to the lower type."""
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
"""Operators whose inputs are cast to float32."""
FLOAT32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Operators that get ``dtype=float32`` by default; their inputs are not cast."""
NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Operators with a float32 result -> the variant that takes a type."""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Operators whose inputs are cast to the widest input type."""
AS_GIVEN = "binary_cross_entropy"
"""Operator that raises an error on CUDA; training reports it."""


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Emulates CUDA's dropout mask of bytes, its fused attention kernel, its autocast lists, and cuDNN's RNNs.

    Autocast's kernels are replaced below Python. So operators inside others, such as log_softmax in cross_entropy, are
    cast as on CUDA. Run the backward pass by `backward`. The oneDNN switch and the kernels are global, so they apply to
    other threads too.
    """
    was_enabled = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags would also call Intel's GPUs about TF32
    torch._C._set_mkldnn_enabled(False)
    try:
        with _Functions(), torch.library._scoped_library("aten", "IMPL") as library:
            with warnings.catch_warnings(action="ignore"):  # torch warns about replaced kernels
                library.impl("linear", _linear, "AutogradCPU")
                for name, kernel in _autocast_kernels():
                    library.impl(name, kernel, KEY)
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
            return self._rnn(func, *args)
        return func(*args, **named)

    def _rnn(self, func: Callable[..., Any], *args: Any) -> Any:
        """Runs an RNN entirely in the lower type under autocast (aten/src/ATen/cudnn/AutocastRNN.cpp)."""
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            with torch.autocast("cpu", enabled=False):
                return self._rnn(func, *_cast(args, dtype))
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


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Adds the bias in place, unlike torch's kernel while a dispatch mode is active (ATen/native/Linear.cpp)."""
    decompose: Callable[..., Tensor] = torch.ops.aten.linear.default.decompose
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return decompose(input, weight, bias)
    return decompose(input, weight).add_(bias)


def _autocast_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields kernels for CUDA's lists. Other operators of the CPU's autocast fall through, as `AS_GIVEN` does."""
    types = ((LOWER, lambda args: torch.get_autocast_dtype("cpu")), (FLOAT32, lambda args: torch.float32))
    ours = {
        name: _in_type(_operator(name), kind) for names, kind in (*types, (WIDEST, _widest)) for name in names.split()
    }
    typed = {name: name for name in FLOAT32_RESULT.split()} | NORM
    ours |= {name: _with_result(_operator(name), _operator(other)) for name, other in typed.items()}
    yield from ours.items()
    cpus = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    for name in sorted({each.removeprefix("aten::") for each in cpus if each.startswith("aten::")} - set(ours)):
        yield name, torch.library.fallthrough_kernel


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


def _in_type(operator: Any, type_of: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **named: Any) -> Any:
        with _ExcludeDispatchKeyGuard(_AUTOCAST):
            dtype = type_of(args)
            return operator(*_cast(args, dtype), **_cast(named, dtype))

    return kernel


def _with_result(operator: Any, typed: Any) -> Callable[..., Any]:
    place = [each.name for each in operator._schema.arguments].index("dtype") if operator is typed else 99

    def kernel(*args: Any, **named: Any) -> Any:
        with _ExcludeDispatchKeyGuard(_AUTOCAST):
            asked = args[place] if len(args) > place else named.get("dtype")
            if asked is not None or not _is_eligible(args[0]):
                return operator(*args, **named)
            return typed(*args[:place], **{**named, "dtype": torch.float32})

    return kernel


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """Returns the lower type unless an input is wider."""
    types = {each.dtype for each in torch.utils._pytree.tree_leaves(args) if _is_eligible(each)}
    lower = torch.get_autocast_dtype("cpu")
    return lower if types <= {lower} else torch.float32


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts float tensors except float64 in nested arguments, the last first, as torch's Linux builds do."""
    if isinstance(value, Tensor):
        return value.to(dtype) if _is_eligible(value) else value
    if isinstance(value, tuple):
        return tuple([_cast(item, dtype) for item in reversed(value)][::-1])
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return value
