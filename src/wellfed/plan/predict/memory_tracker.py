"""Counts the bytes of all live tensors, real or fake.

While a dispatch mode is active, torch creates new tensors instead of writing to a fresh one with no other holder.
Examples are backward formulas such as gather's (``areAnyTensorSubclassLike`` in
torch/csrc/autograd/FunctionsManual.cpp) and the sum of gradients of a tensor that is used twice
(``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp). Fake tensors and this tracker are such modes and
would count too many tensors, so the in-place operator runs here instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode

from wellfed.plan.predict.cudnn import workspace_bytes

aten = torch.ops.aten
SOLE_USES, SOLE_STORAGE_USES = 4, 2
"""Use counts of a tensor held only by C++, as seen by the innermost mode: its holder, the call, the Python object."""
_IN_PLACE = {
    aten.index_add.default: (aten.index_add_.default, SOLE_USES),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, SOLE_USES),
    aten.index_put.default: (aten.index_put_.default, SOLE_USES + 1),  # also an argument of the formula
    aten.masked_scatter.default: (aten.masked_scatter_.default, SOLE_USES),
    aten.put.default: (aten.put_.default, SOLE_USES),
    aten.scatter.src: (aten.scatter_.src, SOLE_USES),
    aten.scatter_add.default: (aten.scatter_add_.default, SOLE_USES),
}


class MemoryTracker(TorchDispatchMode):
    """Counts each storage that an operator returns while the mode is active, until it is freed.

    The kind of a storage is the value of ``making`` at its creation, or set by `note`. Workspaces inside operators are
    not counted, but for those of cuDNN's convolutions on request.
    """

    def __init__(self, block_bytes: int = 1, *, cudnn_workspaces: bool = False) -> None:
        """Rounds the size of each storage up to a multiple of ``block_bytes``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.making = "activations"
        self.live: dict[str, int] = {}
        """Current bytes by kind."""
        self.peak: dict[str, int] = {}
        """Bytes by kind at the highest sum since the last `forget_peak`."""
        self._block_bytes, self._cudnn_workspaces = block_bytes, cudnn_workspaces
        self._total = self._highest = 0
        self.events: list[tuple[int, int]] = []
        """(storage number, bytes) in order since the list was last replaced, for `replay`; 0 bytes means freed."""
        self._storages: dict[int, tuple[weakref.ref[Any], str, int, int]] = {}
        self._count = 0

    def note(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Assigns a kind to these tensors, known or new."""
        for tensor in tensors:
            for storage in _storages(tensor):
                known = self._storages.get(storage._cdata)
                self._leave(storage._cdata, is_event=False)
                self._enter(storage, kind, known[3] if known else 0)

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage in ``events``; 0 = none."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known[3] if known else 0

    def forget_peak(self) -> None:
        """Restarts the highest sum with the live bytes."""
        self._highest, self.peak = self._total, dict(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = in_place_variant(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            for storage in _storages(tensor):
                known = self._storages.get(storage._cdata)
                if known is None:
                    self._make(storage, self.making)
                elif known[2] != self._rounded(storage.nbytes()):  # resize_
                    self._leave(storage._cdata)
                    self._make(storage, known[1])
        if self._cudnn_workspaces and (num_bytes := workspace_bytes(func, args, result)):
            self._use(num_bytes)
        return result

    def _use(self, num_bytes: int) -> None:
        """Counts memory that an operator uses and frees."""
        self._count += 1
        self.events += [(self._count, num_bytes), (self._count, 0)]
        num_bytes = self._rounded(num_bytes)
        if self._total + num_bytes > self._highest:
            self._highest = self._total + num_bytes
            self.peak = {**self.live, self.making: self.live.get(self.making, 0) + num_bytes}

    def _make(self, storage: torch.UntypedStorage, kind: str) -> None:
        self._count += 1
        if num_bytes := storage.nbytes():
            self.events.append((self._count, num_bytes))
        self._enter(storage, kind, self._count)

    def _enter(self, storage: torch.UntypedStorage, kind: str, number: int) -> None:
        key, num_bytes = storage._cdata, self._rounded(storage.nbytes())
        counter = weakref.ref(self)  # a tensor that outlives the tracker must not keep it alive

        def leave(_: Any) -> None:
            if (live := counter()) is not None:
                live._leave(key)

        self._storages[key] = (weakref.ref(storage, leave), kind, num_bytes, number)
        self.live[kind] = self.live.get(kind, 0) + num_bytes
        self._total += num_bytes
        if self._total > self._highest:
            self.forget_peak()

    def _leave(self, key: int, *, is_event: bool = True) -> None:
        known = self._storages.pop(key, None)
        if known is not None:
            _, kind, num_bytes, number = known
            self.live[kind] -= num_bytes
            self._total -= num_bytes
            if is_event and number and num_bytes:
                self.events.append((number, 0))

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    parts = (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
    return [part.untyped_storage() for part in parts]


def in_place_variant(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Returns ``func``, or its variant that writes to the first argument. Valid only in the innermost mode."""
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
