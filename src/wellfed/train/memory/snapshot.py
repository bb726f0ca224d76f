"""Saves an object's attributes while a call may change them, and puts them back where it fails half way."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import generators

LARGE_BYTES = 2**20
"""A tensor beyond this is not copied: whether it has changed is told by torch's count of its changes."""
MANY = 1000
"""A list or dict with more entries is not copied: whether it has changed is told by its length."""
FEW = 64
"""Entries of a list that are looked into; a longer one is appended to, and holds what is done."""
_DEPTH = 8
"""An evaluation may refer to anything; metrics of metrics within a collection are five deep."""


class Snapshot:
    """Attributes of an object and of the objects within it, and the random generators, as they are now.

    Weights are no state of an evaluation.
    """

    def __init__(self, owner: object, device: torch.device, *, leave_out: object = None) -> None:
        """``leave_out``: an object that the owner may refer to and does not change."""
        self._device, self._generators = device, generators.state(device)
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, int | None]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._seen = {id(leave_out)}
        self._has_attributes = hasattr(owner, "__dict__")
        self._kept(owner, _DEPTH)

    def restore(self) -> bool:
        """Put all back; False where something has changed that was not copied, or that can't be told."""
        has_changed = any(version is None or tensor._version != version for tensor, version in self._tensors)
        if has_changed or not self._has_attributes or any(len(each) != length for each, length in self._lengths):
            return False
        generators.restore(self._generators, self._device)
        for live, kept in self._attributes:
            live.clear()
            live.update(kept)
        return True

    def _kept_entry(self, value: Any, depth: int) -> Any:
        """Of a list: what is large and has no count of changes is taken for what was appended, and stays as it is."""
        is_done = isinstance(value, Tensor) and value.nbytes > LARGE_BYTES and value.is_inference()
        return value if is_done else self._kept(value, depth)

    def _kept(self, value: Any, depth: int) -> Any:
        """What is to be put back in the value's place: itself, or a copy."""
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                return value
            if value.nbytes <= LARGE_BYTES:
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
