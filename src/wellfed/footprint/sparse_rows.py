"""Keeps sparse gradients as large as they can be: every row that was looked up is taken for another one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DistinctRows(TorchDispatchMode):
    """``coalesce`` leaves all rows there are, at most as many as the tensor could have.

    A rehearsal repeats a few samples, whose rows would melt into those few. The values are no sums then.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._coalesce.default:
            return _as_coalesced(args[0])
        return func(*args, **(kwargs or {}))


def _as_coalesced(tensor: Tensor) -> Tensor:
    rows = min(tensor._nnz(), math.prod(tensor.shape[: tensor.sparse_dim()]))
    indices, values = tensor._indices()[:, :rows].clone(), tensor._values()[:rows].clone()
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False, is_coalesced=True)
