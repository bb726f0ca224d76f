"""Finds the run of a checkpoint file, reads it, and checks without torch whether it is intact."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.record.entries import FILE_NAME
from wellfed.train.loop.checkpoint_files import is_intact

WAY_OUT = "Name another, e.g. last-1.ckpt."
_NO_CHECKPOINT = (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)
"""Exceptions of torch.load for other content."""
_KEYS = ("state_dict", "global_step")
RESUMED = (*_KEYS, "callbacks", "optimizer_states", "lr_schedulers")
"""Keys that a resume needs."""


def run_folder_of(checkpoint: Path) -> Path:
    """Returns the run folder that a checkpoint file lies in, at any depth; the folder above its own if there is none.

    A `ModelCheckpoint` of the user writes into folders of its own.
    """
    return next((each for each in checkpoint.parents if (each / FILE_NAME).is_file()), checkpoint.parent.parent)


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


def load_checkpoint(path: Path, keys: Sequence[str] = _KEYS, *, trusted: bool = False) -> dict[str, Any]:
    """Returns the content of a checkpoint. Tensors are on the CPU and read from the file when used.

    Args:
        trusted: see `trainer.trusted_checkpoints`.

    Raises:
        ConfigError: no such file, not torch's, damaged, with untrusted objects, or without weights and other ``keys``.
    """
    from wellfed.train.checkpoint_values import load

    try:
        state = load(path, trusted=trusted)
    except OSError as error:
        raise ConfigError.of(str(path), f"can't be read: {error.strerror or error}.", WAY_OUT) from error
    except _NO_CHECKPOINT as error:
        if (unsafe := re.search(r"GLOBAL (\S+)", str(error))) is not None:
            problem = f"holds objects ({unsafe[1]}), which run code when they are read."
            way_out = "If you trust whoever wrote the file, add trainer.trusted_checkpoints=true."
            raise ConfigError.of(str(path), problem, way_out) from error
        # torch then advises to load without weights_only, which must not be shown
        why = first_line(error).partition(". ")[0][:200].rstrip(". ")
        raise ConfigError.of(str(path), f"is no checkpoint that can be loaded ({why}).", WAY_OUT) from error
    content: dict[str, Any] = state if isinstance(state, dict) else {}
    missing = [key for key in keys if key not in content]
    if missing or not isinstance(content["state_dict"], Mapping):
        problem = f"is no checkpoint of a run: it holds no {', no '.join(missing or _KEYS[:1])}."
        weights = "torch.load(file, weights_only=True)" + ('["state_dict"]' if "state_dict" in content else "")
        way_out = f"{WAY_OUT} A new run can begin with its weights, if workload.model loads them: {weights}."
        raise ConfigError.of(str(path), problem, way_out)
    return content
