"""Checks that the samples of a dataset can be read by index."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import Dataset

from wellfed.errors import DataError


def check_items(dataset: Any, *, by_item: bool) -> None:
    """Raises a DataError if samples can't be read by index, or ``fetch`` takes other arguments.

    Args:
        by_item: whether ``fetch`` is left unused.
    """
    name = type(dataset).__name__
    has_getitems, has_fetch = (callable(getattr(dataset, each, None)) for each in ("__getitems__", "fetch"))
    if not (has_getitems or hasattr(dataset, "__getitem__")):
        lacks = "neither __getitem__ nor __iter__"
    elif not has_getitems and type(dataset).__getitem__ is Dataset.__getitem__ and (by_item or not has_fetch):
        lacks = "no __getitem__ of its own"
    elif not hasattr(dataset, "__len__"):
        raise DataError(f"{name} has no __len__, the number of its samples. Give it one, or __iter__ for a stream.")
    else:
        if not by_item:
            _check_fetch(dataset)
        return
    raise DataError(
        f"{name} gives no samples: it has {lacks}. "
        "Give it __getitem__(index) or __getitems__(indices), beside fetch if it has that, or __iter__ for a stream."
    )


def _check_fetch(dataset: Any) -> None:
    try:
        signature = inspect.signature(dataset.fetch)
    except (AttributeError, TypeError, ValueError):  # no such method, or compiled code
        return
    try:
        signature.bind("indices", "rng")
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__}.fetch{signature} is called as fetch(indices, rng), which its parameters don't "
            "allow. Write def fetch(self, indices, rng)."
        ) from None
