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
_RESUMED: tuple[tuple[str, type, bool], ...] = (
    ("global_step", int, True),
    ("pytorch-lightning_version", str, True),
    ("loops", dict, True),
    ("loops.fit_loop", dict, True),
    ("callbacks", dict, True),
    ("optimizer_states", list, True),
    ("lr_schedulers", list, True),
    ("position", dict, False),
    ("position.epoch", int, False),
    ("position.batch", int, False),
    ("position.stream", dict, False),
    ("position.stream.is_over", bool, True),
    ("validation_is_due", bool, False),
    ("rng", dict, False),
    ("rng_of_ranks", list, False),
    ("figures", dict, False),
)
"""Keys that a resume reads: dotted name, type, and whether the dict that holds it must have it.

Lightning writes all that a checkpoint must have; a run adds the others.
"""
_WEIGHTS_ALONE = (
    "Name another, e.g. last-1.ckpt, or start a run whose model loads these weights: "
    'torch.load(file, weights_only=True)["state_dict"].'
)


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


def load_to_resume(path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint with all that a resume needs.

    The contents of Lightning's states are checked only when they are restored.

    Raises:
        ConfigError: as `load_checkpoint` does, or a key is missing or has another type, or a number is impossible.
    """
    content = load_checkpoint(path)
    missing, others = [], []
    for key, kind, is_needed in _RESUMED:
        *holders, name = key.split(".")
        holder: Any = content
        for each in holders:
            holder = holder.get(each) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            continue
        if name not in holder:
            missing += [key] if is_needed else []
        elif not isinstance(value := holder[name], kind):
            others.append(f"{key} is of type {type(value).__name__}, and must be {kind.__name__}")
        elif isinstance(value, int) and not 0 <= value < 2**63:
            others.append(f"{key} is below 0 or above 2**63")
    faults = [*([f"it holds no {' and no '.join(missing)}"] if missing else []), *others]
    if faults:
        raise ConfigError.of(str(path), f"can't be resumed from: {'; '.join(faults)}.", _WEIGHTS_ALONE)
    return content


def _fault(path: Path, problem: str) -> ConfigError:
    return ConfigError.of(str(path), problem, WAY_OUT)
