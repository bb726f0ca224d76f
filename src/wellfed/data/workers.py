"""Explains what can't be sent to worker processes."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wellfed.errors import DataError, first_line


@contextmanager
def sent_to_workers(dataset: Any) -> Iterator[None]:
    """Returns a context in which workers are started.

    Raises:
        DataError: they are spawned, and something that they get does not pickle.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # torch's, for the error below
            yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error):
            raise
        problem = f"{type(dataset).__name__}: spawned worker processes get dataset and functions by pickle, which fails"
        way_out = (
            "Use functions of a module for collate_fn, worker_init_fn and transforms (no lambda, no method of a large "
            "object), or set loader.num_workers=0."
        )
        raise DataError(f"{problem} ({first_line(error)}). {way_out}") from error
