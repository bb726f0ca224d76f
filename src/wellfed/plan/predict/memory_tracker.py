"""Counts the bytes of all live tensors, real or fake."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryTracker(TorchDispatchMode):
    """Counts each storage that an operator returns while the mode is active, until it is freed.

    The kind of a storage is the value of ``making`` at its creation, or set by `note`. Workspaces inside operators are
    not counted.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        """Rounds the size of each storage up to a multiple of ``block_bytes``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.making = "activations"
        self.live: dict[str, int] = {}
        """Current bytes by kind."""
        self.peak: dict[str, int] = {}
        """Bytes by kind at the highest sum since the last `forget_peak`."""
        self._block_bytes = block_bytes
        self._total = self._highest = 0
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def note(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Assigns a kind to these tensors, known or new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._leave(storage._cdata)
            self._enter(storage, kind)

    def forget_peak(self) -> None:
        """Restarts the highest sum with the live bytes."""
        self._highest, self.peak = self._total, dict(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._enter_new(result)
        return result

    def _enter_new(self, result: Any) -> None:
        if isinstance(result, Tensor):
            if result.layout is torch.strided and result.untyped_storage()._cdata not in self._storages:
                self._enter(result.untyped_storage(), self.making)
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._enter_new(item)

    def _enter(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, num_bytes = storage._cdata, -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        counter = weakref.ref(self)  # a tensor that outlives the tracker must not keep it alive

        def leave(_: Any) -> None:
            if (live := counter()) is not None:
                live._leave(key)

        self._storages[key] = (weakref.ref(storage, leave), kind, num_bytes)
        self.live[kind] = self.live.get(kind, 0) + num_bytes
        self._total += num_bytes
        if self._total > self._highest:
            self.forget_peak()

    def _leave(self, key: int) -> None:
        known = self._storages.pop(key, None)
        if known is not None:
            _, kind, num_bytes = known
            self.live[kind] -= num_bytes
            self._total -= num_bytes
