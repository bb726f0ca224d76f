"""Checks that worker processes that start from nothing (spawn, forkserver) can be sent the data set."""

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
"""How far down the data set's attributes the culprit is looked for."""


def check_picklable(builder: BatchBuilder) -> None:
    """A DataError if worker processes can't be sent what they need; it names the attribute."""
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
    """Why a value can't be pickled; None = it can. Neither copies nor moves tensors and arrays."""
    try:
        _Dry(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    except RuntimeError as error:
        # multiprocessing's own locks and arrays are handed on when a process starts, and only then.
        return None if "inheritance" in str(error) else error
    except Exception as error:  # noqa: BLE001  whatever __reduce__ and __getstate__ raise
        return error
    return None


def where_it_fails(value: Any, depth: int = _DEPTH) -> str:
    """Path from a value to what in it can't be pickled: ``.transforms[2]``; empty = the value itself."""
    if depth:
        for step, part in _parts(value):
            if failure(part) is not None:
                return step + where_it_fails(part, depth - 1)
    return ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())


class _Dry(pickle.Pickler):
    """Writes nothing of what is large."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
            return int, ()
        return NotImplemented
