"""Checks that a dataset can be sent to worker processes that start empty (spawn, forkserver)."""

from __future__ import annotations

import io
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.errors import DataError

_DEPTH = 6
"""Maximum depth of attributes in the search for the cause."""


def check_picklable(builder: BatchBuilder) -> None:
    """Raises a DataError that names the attribute if the builder can't be sent to worker processes."""
    error = failure(builder)
    if error is None:
        return
    name = type(builder.dataset).__name__
    of_set = failure(builder.dataset)
    where = f"{name}{where_it_fails(builder.dataset)}" if of_set is not None else "collate"
    method = multiprocessing.get_start_method()
    raise DataError(
        f"{where} can't be sent to worker processes, which start from nothing here (multiprocessing's {method}): "
        f"{of_set or error}. Use a function or class of a module instead of a lambda, a local function or an open "
        "file, or set loader.backend=inline (threads, for data with fetch)."
    ) from error


def failure(value: Any) -> Exception | None:
    """Returns why a value can't be pickled, or None. Contents of tensors and arrays are not copied."""
    try:
        _WithoutTensors(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    except RuntimeError as error:
        # multiprocessing's own locks and arrays can be pickled only while a process starts
        return None if "inheritance" in str(error) else error
    except Exception as error:  # noqa: BLE001  whatever __reduce__ and __getstate__ raise
        return error
    return None


def where_it_fails(value: Any, depth: int = _DEPTH) -> str:
    """Returns the path to the member that can't be pickled, such as ``.transforms[2]``; empty = the value itself."""
    if depth:
        for step, member in _members(value):
            if failure(member) is not None:
                return step + where_it_fails(member, depth - 1)
    return ""


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", member) for number, member in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{name}", member) for name, member in vars(value).items())


class _WithoutTensors(pickle.Pickler):
    """A pickler that skips the contents of tensors and arrays."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
            return int, ()
        return NotImplemented
