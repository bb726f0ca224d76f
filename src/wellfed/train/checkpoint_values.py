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
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import NoneType
from typing import Any

import numpy as np
import torch

from wellfed.errors import WellfedError

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
_DATES_AND_PATHS = (date, datetime, time, timedelta, timezone, PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
_FACTORIES = (bool, int, float, str, list, dict, tuple, set)
"""Factories of a defaultdict that a file may name."""
_HYPER_PARAMETERS = re.compile(r"(datamodule_)?(hyper_parameters|hparams_)")
"""Names of what Lightning saves for `save_hyperparameters`. A resume does not need them."""


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
        WellfedError: another value is an object; the error names the first one, by its keys and class.
    """
    left_out: list[str] = []
    return _plain(dict(checkpoint), "", left_out), left_out


class _Call:
    """Value that pickle writes as a call of one of `SAFE`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made


def _plain(content: Any, name: str, left_out: list[str]) -> Any:
    """Returns a copy that holds only what `load` reads. Mappings of Lightning and OmegaConf become dicts.

    Raises:
        WellfedError: there is an object, and ``name`` is not that of hyperparameters.
    """
    kind = type(content)
    if kind in _PLAIN or (isinstance(content, torch.Tensor) and kind.__module__.partition(".")[0] == "torch"):
        return content
    if isinstance(content, (PurePath, np.generic)) and _HYPER_PARAMETERS.match(name):
        return str(content) if isinstance(content, PurePath) else content.item()  # as `load_from_checkpoint` can read
    if kind in (dict, OrderedDict, Counter, defaultdict) or (
        isinstance(content, Mapping) and kind.__module__.startswith(("lightning.", "omegaconf."))
    ):
        return _plain_mapping(content, name, left_out)
    if kind in (list, tuple, set, frozenset, deque):
        items = [_plain(item, name, left_out) for item in content]
        return _Call(deque, items, content.maxlen) if kind is deque else kind(items)
    if kind in (np.ndarray, np.memmap) and not content.dtype.hasobject:
        file = io.BytesIO()
        np.save(file, content, allow_pickle=False)
        return _Call(array, torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    if isinstance(content, np.generic) and np.dtype(content.dtype.str) == content.dtype:
        return _Call(scalar, content.dtype.str, content.tobytes())
    inside = content.dtype if isinstance(content, np.ndarray) else getattr(content, "tzinfo", None)
    is_known = kind in (*_DATES_AND_PATHS, *torch.serialization.get_safe_globals())
    if is_known and type(inside) in (NoneType, timezone):
        return content
    raise _refused(name, kind, inside)


def _plain_mapping(content: Any, name: str, left_out: list[str]) -> Any:
    factory = getattr(content, "default_factory", None)
    if factory not in (None, *_FACTORIES):
        raise _refused(f"{name}.default_factory", type(factory))
    # A state_dict has the versions of its modules as an attribute, which its copy has too.
    kept: Any = copy.copy(content) if type(content) in (OrderedDict, Counter) else {}
    kept.clear()
    for key, value in content.items():
        inner = f"{name}.{key}" if name else str(key)
        try:
            kept[_plain(key, inner, left_out)] = _plain(value, inner, left_out)
        except WellfedError:
            if not _HYPER_PARAMETERS.match(inner):
                raise
            left_out.append(inner)
    return _Call(defaultdict, factory, kept) if type(content) is defaultdict else kept


def _refused(name: str, kind: type, inside: object = None) -> WellfedError:
    named = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    named += "" if inside is None else f" ({type(inside).__name__})"
    return WellfedError(
        f"A checkpoint can't hold {name}: it is of {named}, which runs code when it is read. Save plain values in its "
        "place (numbers, text, lists, dicts, tensors, arrays), or set trainer.trusted_checkpoints=true, which pickles "
        "objects as Lightning does."
    )


def array(data: torch.Tensor) -> Any:
    """Returns the array in the bytes of a .npy file. numpy's own pickles can place an array at any address."""
    return np.load(io.BytesIO(data.numpy().tobytes()), allow_pickle=False)


def scalar(kind: str, data: bytes) -> Any:
    """Returns a number of numpy from its type and bytes."""
    return np.frombuffer(data, kind)[0]


SAFE: list[Any] = [*_DATES_AND_PATHS, *_FACTORIES, frozenset, deque, defaultdict, array, scalar]
"""Classes and functions that a checkpoint may name, beside those of torch."""
