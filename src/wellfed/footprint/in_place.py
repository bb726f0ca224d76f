"""Finds the in-place operator that torch runs where no dispatch mode watches.

While a dispatch mode is active, torch makes new tensors in places where it otherwise writes to one that it has just
made and that nobody else holds: in formulas of backward passes such as that of gather (``areAnyTensorSubclassLike`` in
torch/csrc/autograd/FunctionsManual.cpp), where the gradients of a tensor that is used twice are added
(``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp), and where a linear layer adds its bias
(aten/src/ATen/native/Linear.cpp). Fake tensors, and all that counts tensors, are such modes: what they see is a tensor
more than what a run takes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

aten = torch.ops.aten
SOLE_USES, SOLE_STORAGE_USES = 4, 2
"""Of a tensor that C++ alone holds, seen by the innermost mode: its holder, the call, and the Python object beside."""
_IN_PLACE = {
    aten.index_add.default: (aten.index_add_.default, SOLE_USES),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, SOLE_USES),
    aten.index_put.default: (aten.index_put_.default, SOLE_USES + 1),  # also an argument of the formula
    aten.masked_scatter.default: (aten.masked_scatter_.default, SOLE_USES),
    aten.put.default: (aten.put_.default, SOLE_USES),
    aten.scatter.src: (aten.scatter_.src, SOLE_USES),
    aten.scatter_add.default: (aten.scatter_add_.default, SOLE_USES),
}


def in_place_variant(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """``func``, or the operator that writes to the first argument. For the innermost of all modes."""
    if func is aten.add.Tensor:
        return aten.add_.Tensor if _adds_gradients(args, kwargs) else func
    other, uses = _IN_PLACE.get(func, (func, 0))
    return other if uses and _in_backward() and _is_held_by_autograd_alone(args[0], uses) else func


@contextlib.contextmanager
def bias_in_place() -> Iterator[None]:
    """Linear layers of CPU tensors add their bias in place also while a mode is active, in all threads."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
            library.impl("linear", _linear, "AutogradCPU")
        yield


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    is_one_operator = bias is None or input.dim() <= 2 or input.is_contiguous()
    if is_one_operator:
        return aten.linear.default.decompose(input, weight, bias)  # type: ignore[no-any-return]
    return aten.linear.default.decompose(input, weight).add_(bias)  # type: ignore[no-any-return]


def _adds_gradients(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    if kwargs or len(args) != 2 or torch.is_grad_enabled() or not _in_backward():
        return False
    one, two = args
    return (
        isinstance(two, Tensor)
        and one.shape == two.shape
        and one.dtype == two.dtype
        and _is_held_by_autograd_alone(one)
        and is_non_overlapping_and_dense_or_false(one)
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _is_held_by_autograd_alone(tensor: Tensor, uses: int = SOLE_USES) -> bool:
    if tensor.layout is not torch.strided or tensor._use_count() != uses:  # type: ignore[attr-defined]
        return False
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == SOLE_STORAGE_USES)
