"""Keeps footprints on disk, so that the same model under the same training is measured once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.footprint.estimate import measure
from wellfed.footprint.fingerprint import class_name, code, described, file_digest
from wellfed.footprint.footprint import Footprint, NoEstimate
from wellfed.footprint.rehearsal import Task
from wellfed.step import train_step

FILE_NAME = "footprint.json"
_STEP = Path(train_step.__file__).parent
"""What is rehearsed."""


def cached_measure(
    model: nn.Module, task: Task, samples: int, cache_dir: Path, *, host_bytes: int | None = None
) -> Footprint | NoEstimate:
    """As `estimate.measure`, from ``<cache_dir>/footprints/<digest>/footprint.json`` where it is there.

    A damaged file is written anew; where nothing can be written, nothing is kept.
    """
    file: Path | None = None
    with contextlib.suppress(Exception):  # foreign code again: what is wrong with it, measuring will tell
        file = cache_dir / "footprints" / digest(model, task, samples) / FILE_NAME
    if file is not None and (kept := load(file)) is not None:
        return kept
    found = measure(model, task, samples, host_bytes=host_bytes)
    if file is not None and isinstance(found, Footprint):
        store(file, found)
    return found


def load(file: Path) -> Footprint | None:
    """The footprint in a file; None if there is none, or nothing that can be read."""
    try:
        return Footprint.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def store(file: Path, footprint: Footprint) -> None:
    """Write it in one go: who reads meanwhile finds the old file or the new one."""
    own = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a cache that can't be kept costs seconds, not the run
        file.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(footprint.to_dict(), indent=1) + "\n", encoding="utf-8")
        own.replace(file)


def digest(model: nn.Module, task: Task, samples: int) -> str:
    """16 hex digits that change with all that a footprint depends on, and not with weights or learning rates."""
    shapes = [_shape(tensor) for tensor in batches.tensors(task.make_batch(2))]
    optimizer = task.make_optimizer(model)
    content = {
        "torch": torch.__version__,
        "rooms": [file_digest(file) for room in (Path(__file__).parent, _STEP) for file in sorted(room.glob("*.py"))],
        "model": [(name, *described(module)) for name, module in model.named_modules()],
        "tensors": [(name, *_shape(each)) for name, each in _named_tensors(model)],
        "code": code([*model.modules(), *task.shaped_by, optimizer]),
        "shaped by": [described(each) for each in task.shaped_by],
        "batch": shapes,
        "optimizer": [class_name(optimizer), [_options(group) for group in optimizer.param_groups]],
        "training": [task.precision, task.checkpointed, task.feature_mode, task.compile_mode, samples],
        "allocator": task.expandable_segments,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return (list(tensor.shape), str(tensor.dtype), tensor.requires_grad)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a float only whether it is 0: that decides what is computed."""
    return {
        name: len(value) if name == "params" else bool(value) if isinstance(value, float) else repr(value)
        for name, value in group.items()
    }
