"""Reads and writes the values of checkpoint files. The only file that loads a checkpoint with torch.

A file holds tensors, numpy arrays, dates, paths and Python's own containers. An object of any other class would run
code when it is read, so it is refused unless the user sets `trainer.trusted_checkpoints`.
"""

from __future__ import annotations

import copy
import io
import os
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MappingProxyType, NoneType
from typing import Any

import numpy as np
import torch

from wellfed.errors import ConfigError, Fault, WellfedError

_PLAIN = frozenset((NoneType, bool, int, float, complex, str, bytes, bytearray))
_PLAIN |= {torch.Size, torch.dtype, torch.device, torch.layout}
_OBJECTS: tuple[type, ...] = (date, datetime, time, timedelta, timezone, Decimal, Fraction, range)
_OBJECTS += (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
_FACTORIES = (bool, int, float, str, list, dict, tuple, set)
"""Factories of a defaultdict that a file may name."""
_HYPER_PARAMETERS = re.compile(r"(datamodule_)?(hyper_parameters|hparams_)")
"""Names of what Lightning saves for `save_hyperparameters`. A resume does not need them."""
_LEFT_OUT = object()
_WAY_OUT = (
    "Save plain values in its place (numbers, text, lists, dicts, tensors, arrays), or set "
    "trainer.trusted_checkpoints=true, which pickles objects as Lightning does."
)


def load(path: Path | str, *, trusted: bool = False) -> Any:
    """Returns the content of a checkpoint. Tensors are on the CPU and read from the file when used.

    Args:
        trusted: reads objects of any class, which runs the code that the file names.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError and others: the file can't be read.
    """
    with torch.serialization.safe_globals(SAFE):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)


def save(content: Any, path: Path) -> None:
    """Writes a file and flushes it to disk, without a copy in memory, as Lightning makes it."""
    path.parent.mkdir(exist_ok=True)  # not its parents: a removed run folder is not made again
    path.touch()  # raises an OSError where the file can't be made; torch.save would hide it
    torch.save(content, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def readable(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a copy that `load` accepts, and the names of hyperparameters that are objects, which it lacks.

    Raises:
        WellfedError: another value is an object.
    """
    content, left_out, refused = _split(checkpoint)
    if refused:
        raise WellfedError("The checkpoint can't be written:\n" + "\n".join(f"  - {fault}" for fault in refused))
    return content, left_out


def check(checkpoint: Mapping[str, Any]) -> None:
    """Raises a ConfigError that names each value that `load` could not read, by its keys and class."""
    if refused := _split(checkpoint)[2]:
        raise ConfigError(refused)


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[Fault]]:
    found: list[tuple[str, str]] = []
    content = _plain(dict(checkpoint), found, "")
    left_out = [f"{name} ({kind})" for name, kind in found if _HYPER_PARAMETERS.match(name)]
    refused = [
        Fault(f"checkpoint[{name}]", f"is of {kind}, which runs code when it is read.", _WAY_OUT)
        for name, kind in found
        if not _HYPER_PARAMETERS.match(name)
    ]
    return content, left_out, refused


class _Call:
    """Value that pickle writes as a call of one of `SAFE`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made


def _plain(content: Any, found: list[tuple[str, str]], name: str) -> Any:
    """Returns a copy without objects. Their names and classes are added to ``found``.

    Mappings of Lightning and OmegaConf become dicts. A list with an object is left out as a whole.
    """
    kind = type(content)
    if kind in _PLAIN or (isinstance(content, torch.Tensor) and kind.__module__.partition(".")[0] == "torch"):
        return content
    if isinstance(content, (PurePath, np.generic)) and _HYPER_PARAMETERS.match(name):
        return str(content) if isinstance(content, PurePath) else content.item()  # as `load_from_checkpoint` can read
    if kind in _MAPPINGS or (isinstance(content, Mapping) and kind.__module__.startswith(("lightning.", "omegaconf."))):
        return _plain_mapping(content, found, name)
    if kind in (list, tuple, set, frozenset, deque):
        items = [_plain(item, found, name) for item in content]
        if any(item is _LEFT_OUT for item in items):
            return _LEFT_OUT
        if kind is deque:
            return _Call(deque, items, content.maxlen)
        return _Call(frozenset, items) if kind is frozenset else kind(items)
    if kind in (np.ndarray, np.memmap) and not content.dtype.hasobject:
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asarray(content), allow_pickle=False)
        return _Call(array, torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    if isinstance(content, np.generic) and np.dtype(content.dtype.str) == content.dtype and not content.dtype.hasobject:
        return _Call(scalar, content.dtype.str, content.tobytes())
    zone = content.tzinfo if kind in (datetime, time) else None
    if kind in (*_OBJECTS, *torch.serialization.get_safe_globals()) and type(zone) in (NoneType, timezone):
        return content
    named = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    inside = content.dtype if isinstance(content, np.ndarray) else zone
    found.append((name, named if inside is None else f"{named} ({type(inside).__name__})"))
    return _LEFT_OUT


def _plain_mapping(content: Any, found: list[tuple[str, str]], name: str) -> Any:
    factory = getattr(content, "default_factory", None)
    if factory not in (None, *_FACTORIES):
        found.append((f"{name}.default_factory", "function"))
        return _LEFT_OUT
    # A state_dict has the versions of its modules as an attribute, which its copy has too.
    kept = copy.copy(content) if type(content) is OrderedDict else Counter() if type(content) is Counter else {}
    kept.clear()
    for key, value in content.items():
        inner = f"{name}.{key}" if name else str(key)
        entry = [_plain(key, found, inner), _plain(value, found, inner)]
        if not any(one is _LEFT_OUT for one in entry):
            kept[entry[0]] = entry[1]
    return _Call(defaultdict, factory, kept) if type(content) is defaultdict else kept


def array(data: torch.Tensor) -> Any:
    """Returns the array in the bytes of a .npy file. numpy's own pickles can place an array at any address."""
    return np.lib.format.read_array(io.BytesIO(data.numpy().tobytes()), allow_pickle=False)


def scalar(kind: str, data: bytes) -> Any:
    """Returns a number of numpy from its type and bytes."""
    return np.frombuffer(data, kind)[0]


_MAPPINGS = (dict, OrderedDict, Counter, defaultdict, MappingProxyType)
SAFE: list[Any] = [*_OBJECTS, *_FACTORIES, frozenset, deque, defaultdict, array, scalar]
"""Classes and functions that a checkpoint may name, beside those of torch."""
