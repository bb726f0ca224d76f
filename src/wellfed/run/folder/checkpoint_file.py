"""Reads a checkpoint file, and checks without torch whether it is intact."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from wellfed.errors import ConfigError, first_line
from wellfed.train.lightning.checkpoints import checkpoint_trailer

WAY_OUT = "Name another, e.g. last-1.ckpt."
_NEEDED = ("data.pkl", "version")
"""Entries without which torch.load does not recognise a zip archive."""
_NO_CHECKPOINT = (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)
"""Exceptions of torch.load for other content."""
_KEYS = ("state_dict", "global_step")


def is_readable(checkpoint: Path) -> bool:
    """Returns whether a file is an archive of torch.save with every byte as written, by its digest.

    Files of earlier versions have no digest, so their archive checksums are compared. The whole file is read, once
    until it changes. torch itself would load changed bytes without an error.
    """
    try:
        found = checkpoint.stat()
    except OSError:
        return False
    return _is_whole(checkpoint, found.st_ino, found.st_size, found.st_mtime_ns)


def step_of(checkpoint: Path) -> int | None:
    """Returns the step in a checkpoint's trailer; None if it has none."""
    try:
        step = (checkpoint_trailer.facts_of(checkpoint) or {}).get("step")
    except OSError:
        return None
    return step if isinstance(step, int) else None


@lru_cache(maxsize=32)
def _is_whole(checkpoint: Path, *_version: int) -> bool:
    try:
        is_intact = checkpoint_trailer.is_intact(checkpoint)
        if is_intact is not None:
            return is_intact
        with zipfile.ZipFile(checkpoint) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
            return names.issuperset(_NEEDED) and archive.testzip() is None  # torch.save writes each entry's CRC-32
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError):
        return False  # RuntimeError: a damaged flag reads as encryption or an unknown method


def load_checkpoint(path: Path, keys: Sequence[str] = _KEYS) -> dict[str, Any]:
    """Returns the content of a checkpoint. Tensors are on the CPU and read from the file when used.

    Raises:
        ConfigError: no such file, not torch's, damaged, or without weights and the other ``keys``.
    """
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise _fault(path, f"can't be read: {error.strerror or error}.") from error
    except _NO_CHECKPOINT as error:
        # torch then advises to load without weights_only, which must not be shown
        why = first_line(error).partition(". ")[0][:200].rstrip(". ")
        raise _fault(path, f"is no checkpoint that can be loaded ({why}).") from error
    content: dict[str, Any] = state if isinstance(state, dict) else {}
    missing = [key for key in keys if key not in content]
    if missing or not isinstance(content["state_dict"], Mapping):
        raise _fault(path, f"is no checkpoint of a run: it holds no {' and no '.join(missing or _KEYS[:1])}.")
    return content


def _fault(path: Path, problem: str) -> ConfigError:
    return ConfigError.of(str(path), problem, WAY_OUT)
