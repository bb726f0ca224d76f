"""Makes autocast on CPU tensors cast the operators that CUDA's autocast casts; the lists of both differ.

The lists are those of aten/src/ATen/autocast_mode.h (torch 2.13; a test compares them with the operators that torch
has registered). They are put at the place of the CPU's own, below Python: operators that call others inside, as
cross_entropy calls log_softmax and nll_loss, are then cast where CUDA casts them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

KEY = "AutocastCPU"
LOWER = (
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution "
    "cudnn_convolution_transpose"
)
"""Inputs are cast to the lower type."""
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
"""Inputs are cast to float32."""
FLOAT32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Given ``dtype=float32`` where none was asked for; what is read stays as it is."""
NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""As above, by an operator that takes a type."""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Inputs are cast to the widest of their types."""
AS_GIVEN = "binary_cross_entropy"
"""An error on CUDA, of which training tells."""


@contextlib.contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """``torch.autocast("cpu", ...)`` casts as ``torch.autocast("cuda", ...)`` does, in all threads of this process."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
            for name, kernel in _kernels():
                library.impl(name, kernel, KEY)
        yield


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    ours: dict[str, Callable[..., Any]] = dict.fromkeys(AS_GIVEN.split(), torch.library.fallthrough_kernel)
    ours |= {name: _in_type(_operator(name), _lower) for name in LOWER.split()}
    ours |= {name: _in_type(_operator(name), lambda args: torch.float32) for name in FLOAT32.split()}
    ours |= {name: _in_type(_operator(name), _widest) for name in WIDEST.split()}
    ours |= {name: _with_result(_operator(name), _operator(name)) for name in FLOAT32_RESULT.split()}
    ours |= {name: _with_result(_operator(name), _operator(typed)) for name, typed in NORM.items()}
    cpus = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    yield from ours.items()
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
            return operator(*cast(args, dtype), **cast(named, dtype))

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


def _lower(args: tuple[Any, ...]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """The lower type unless an input is wider."""
    types = {each.dtype for each in torch.utils._pytree.tree_leaves(args) if _is_eligible(each)}
    lower = torch.get_autocast_dtype("cpu")
    return lower if types <= {lower} else torch.float32


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of float types, float64 aside, in nested arguments; the last first, as torch's builds for Linux do."""
    if isinstance(value, Tensor):
        return value.to(dtype) if _is_eligible(value) else value
    if isinstance(value, tuple):
        return tuple([cast(item, dtype) for item in reversed(value)][::-1])
    if isinstance(value, list):
        return [cast(item, dtype) for item in value]
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    return value
