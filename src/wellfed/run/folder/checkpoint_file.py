"""Reads a checkpoint file, and checks without torch whether it is intact."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.train.lightning.checkpoints.checkpoint_files import is_intact

WAY_OUT = "Name another, e.g. last-1.ckpt."
_WEIGHTS_ALONE = (
    "Name another, e.g. last-1.ckpt, or start a run whose model loads these weights: "
    'torch.load(file, weights_only=True)["state_dict"].'
)
_NO_CHECKPOINT = (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)
"""Exceptions of torch.load for other content."""
_KEYS = ("state_dict", "global_step")
RESUMED = (*_KEYS, "callbacks", "optimizer_states", "lr_schedulers")
"""Keys that a resume needs."""


def is_readable(checkpoint: Path) -> bool:
    """Returns whether a file is a whole archive of torch.save, by its checksums.

    The whole file is read, once until it changes. torch itself would load changed bytes without an error.
    """
    try:
        found = checkpoint.stat()
    except OSError:
        return False
    return _is_whole(checkpoint, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=32)
def _is_whole(checkpoint: Path, *_version: int) -> bool:
    return is_intact(checkpoint)


def load_checkpoint(path: Path, keys: Sequence[str] = _KEYS) -> dict[str, Any]:
    """Returns the content of a checkpoint. Tensors are on the CPU and read from the file when used.

    Raises:
        ConfigError: no such file, not torch's, damaged, or without weights and the other ``keys``.
    """
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ConfigError.of(str(path), f"can't be read: {error.strerror or error}.", WAY_OUT) from error
    except _NO_CHECKPOINT as error:
        # torch then advises to load without weights_only, which must not be shown
        why = first_line(error).partition(". ")[0][:200].rstrip(". ")
        raise ConfigError.of(str(path), f"is no checkpoint that can be loaded ({why}).", WAY_OUT) from error
    content: dict[str, Any] = state if isinstance(state, dict) else {}
    missing = [key for key in keys if key not in content]
    if missing or not isinstance(content["state_dict"], Mapping):
        problem = f"is no checkpoint of a run: it holds no {' and no '.join(missing or _KEYS[:1])}."
        raise ConfigError.of(str(path), problem, _WEIGHTS_ALONE)
    return content
