"""Writes checkpoint files of plain values and tensors, which a weights-only load accepts."""

from __future__ import annotations

import copy
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device, torch.layout)
_LEFT_OUT = object()


def save_flushed(content: Any, path: Path) -> None:
    """Writes a file and flushes it to disk, without a copy in memory, as Lightning makes it."""
    path.parent.mkdir(exist_ok=True)  # not its parents: a removed run folder is not made again
    path.touch()  # raises an OSError where the file can't be made; torch.save would hide it
    torch.save(content, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def plain(content: Any, left_out: list[str], name: str = "") -> Any:
    """Returns a copy that a weights-only load accepts: plain values, tensors, dicts, lists, tuples, sets.

    Paths become text, mappings become dicts, numpy's numbers become Python's. Other entries are left out and added to
    ``left_out``, as dotted name and type. A list with such an entry is left out as a whole.
    """
    if isinstance(content, Mapping) and type(content) is not Counter:
        # A state_dict has the versions of its modules as an attribute, which its copy has too.
        kept = copy.copy(content) if type(content) is OrderedDict else {}
        kept.clear()
        for key, value in content.items():
            inner = f"{name}.{key}" if name else str(key)
            entry = [plain(key, left_out, inner), plain(value, left_out, inner)]
            if not any(one is _LEFT_OUT for one in entry):
                kept[entry[0]] = entry[1]
        return kept
    if type(content) in (list, tuple, set):
        items = [plain(item, left_out, name) for item in content]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else type(content)(items)
    if isinstance(content, np.generic):
        return content.item()
    if isinstance(content, PurePath):
        return str(content)
    if content is None or isinstance(content, torch.Tensor):
        return content
    if type(content) in (Counter, *_PLAIN, *torch.serialization.get_safe_globals()):
        return content
    left_out.append(f"{name} ({type(content).__qualname__})")
    return _LEFT_OUT
