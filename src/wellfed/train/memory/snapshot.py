"""Saves the attributes of an object before a call, and restores them if the call fails."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import generators

LARGE_BYTES = 2**20
"""Bytes beyond which a tensor is not copied. torch's count of its changes shows whether it has changed."""
MANY = 1000
"""Entries beyond which a list or dict is not copied. Its length shows whether it has changed."""
FEW = 64
"""Maximum length of a list whose entries are copied, too. Longer lists are only appended to."""
_DEPTH = 8
"""Maximum depth of copied objects. Metrics of metrics within a collection are five deep."""


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, also of a sparse one, for which torch defines no ``nbytes``."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class Snapshot:
    """Attributes of an object and of the objects within it, and the random generators, as they are now. Parameters are
    left out, since an evaluation does not change them."""

    def __init__(self, owner: object, device: torch.device, *, leave_out: object = None) -> None:
        """``leave_out``: an object that the owner may refer to, but does not change."""
        self._device, self._generators = device, generators.state(device)
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, int | None]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._seen = {id(leave_out)}
        self._has_attributes = hasattr(owner, "__dict__")
        self._kept(owner, _DEPTH)

    def restore(self) -> bool:
        """Restores all attributes. Returns False if something that was not copied may have changed."""
        has_changed = any(version is None or tensor._version != version for tensor, version in self._tensors)
        if has_changed or not self._has_attributes or any(len(each) != length for each, length in self._lengths):
            return False
        generators.restore(self._generators, self._device)
        for live, kept in self._attributes:
            live.clear()
            live.update(kept)
        return True

    def _kept_entry(self, value: Any, depth: int) -> Any:
        """Returns an entry of a list to restore. A large tensor without a count of changes stays as it is."""
        is_done = isinstance(value, Tensor) and bytes_of(value) > LARGE_BYTES and value.is_inference()
        return value if is_done else self._kept(value, depth)

    def _kept(self, value: Any, depth: int) -> Any:
        """Returns the value to restore: itself, or a copy."""
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                return value
            if bytes_of(value) <= LARGE_BYTES:
                return value.clone()
            self._tensors.append((value, None if value.is_inference() else value._version))
            return value
        if type(value) in (list, dict, set):
            if len(value) > MANY:
                self._lengths.append((value, len(value)))
                return value
            if type(value) is dict:
                return {key: self._kept(item, depth) for key, item in value.items()}
            if type(value) is list and len(value) <= FEW:
                return [self._kept_entry(item, depth) for item in value]
            return value.copy()
        is_plain = isinstance(value, (type, FunctionType, ModuleType)) or not hasattr(value, "__dict__")
        if not is_plain and depth and id(value) not in self._seen:
            self._seen.add(id(value))
            live = vars(value)
            self._attributes.append((live, {name: self._kept(item, depth - 1) for name, item in live.items()}))
        return value
