"""The operator that a backward pass would run if nobody watched it.

While a dispatch mode is active, torch's autograd makes new tensors in places where it otherwise writes to one that it
has just made and that nobody else holds: in formulas such as that of gather (``areAnyTensorSubclassLike`` in
torch/csrc/autograd/FunctionsManual.cpp), and where the gradients of a tensor that is used twice are added
(``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp). Fake tensors, and all that counts tensors, are
such modes: what they see is a tensor more than what a run takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def without_a_mode(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """``func``, or the operator that writes to the first argument. For the innermost of all modes."""
    if func is aten.add.Tensor:
        return aten.add_.Tensor if _adds_gradients(args, kwargs) else func
    other, uses = _IN_PLACE.get(func, (func, 0))
    return other if uses and _in_backward() and _is_held_by_autograd_alone(args[0], uses) else func


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
