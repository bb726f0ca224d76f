"""Counts the bytes of all tensors that live, on real and on fake tensors alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wellfed.footprint.in_place import in_place_variant


class MemoryTracker(TorchDispatchMode):
    """While entered, notes each storage that an operator returns, until it is freed.

    Each storage is of a kind: that of ``making`` when it was made, or the one that `note` gave it. What kernels use
    inside an operator (workspaces) is not seen.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        """
        Args:
            block_bytes: each storage counts as the next multiple of it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.making = "activations"
        self.live: dict[str, int] = {}
        """Bytes of each kind now."""
        self.peak: dict[str, int] = {}
        """Bytes of each kind when their sum was highest, since the last `forget_peak`."""
        self._block_bytes = block_bytes
        self._total = self._highest = 0
        self.events: list[tuple[int, int]] = []
        """What operators made and what of it was let go, in order, since the list was last exchanged: a number for each
        storage with its bytes, or 0 where it is freed. For `replay`."""
        self._storages: dict[int, tuple[weakref.ref[Any], str, int, int]] = {}
        self._count = 0

    def note(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count these from now on as of a kind, whether they were known or not."""
        for tensor in tensors:
            for storage in _storages(tensor):
                known = self._storages.get(storage._cdata)
                self._leave(storage._cdata, is_event=False)
                self._enter(storage, kind, known[3] if known else 0)

    def number(self, tensor: Tensor) -> int:
        """Of its storage among the ``events``; 0 = none."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known[3] if known else 0

    def forget_peak(self) -> None:
        """The highest sum begins anew, with what lives now."""
        self._highest, self.peak = self._total, dict(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = in_place_variant(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else _tensors(result):
            for storage in _storages(tensor):
                known = self._storages.get(storage._cdata)
                if known is None:
                    self._make(storage, self.making)
                elif known[2] != self._rounded(storage):  # resize_
                    self._leave(storage._cdata)
                    self._make(storage, known[1])
        return result

    def _make(self, storage: torch.UntypedStorage, kind: str) -> None:
        self._count += 1
        if num_bytes := storage.nbytes():
            self.events.append((self._count, num_bytes))
        self._enter(storage, kind, self._count)

    def _enter(self, storage: torch.UntypedStorage, kind: str, number: int) -> None:
        key, num_bytes = storage._cdata, self._rounded(storage)
        self._storages[key] = (weakref.ref(storage, self._leaver(key)), kind, num_bytes, number)
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

    def _leaver(self, key: int) -> Callable[[Any], None]:
        """Not bound to self: what outlives the counting must not keep it alive."""
        counter = weakref.ref(self)

        def leave(_: Any) -> None:
            if (live := counter()) is not None:
                live._leave(key)

        return leave

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._block_bytes) * self._block_bytes


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def _storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    else:
        yield tensor.untyped_storage()
