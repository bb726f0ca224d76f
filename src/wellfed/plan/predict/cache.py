"""Caches footprints on disk, so that a model with the same training settings is measured once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellfed import batches, project
from wellfed.errors import INSTALLED, ConfigError
from wellfed.plan.predict.estimate import measure
from wellfed.plan.predict.peak import Footprint, NoEstimate
from wellfed.plan.predict.rehearsal import Task
from wellfed.record import text_of, write_atomically

FILE_NAME = "footprint.json"
DEPTH = 3
"""Depth of nested objects in a digest; below, only the class counts."""
MOST_ITEMS = 64
"""Maximum number of items of a list, mapping or array in a digest; the length counts too."""
MOST_CHARACTERS = 1000
_REHEARSED = ("plan/predict/*.py", "train/step/*.py", "train/memory/*.py", "batches.py")
"""Files of the engine that decide what a rehearsal measures."""
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_NOT_THEIRS = frozenset({"torch", "wellfed", "hydra_plugins", "builtins", "__main__"})
"""Packages whose loaded modules do not count: torch has its version, and the other modules depend on the command."""


def cached_measure(
    model: nn.Module, task: Task, samples: int, cache_dir: Path, *, host_bytes: int | None = None
) -> Footprint | NoEstimate:
    """Returns the footprint in ``<cache_dir>/footprints/<digest>/footprint.json``, else from `estimate.measure`.

    A damaged file is replaced. If writing fails, nothing is cached.
    """
    file: Path | None = None
    with contextlib.suppress(Exception):  # the model's own code; measuring reports its errors
        file = cache_dir / "footprints" / digest(model, task, samples) / FILE_NAME
    if file is not None and (kept := load(file)) is not None:
        return kept
    found = measure(model, task, samples, host_bytes=host_bytes)
    if file is not None and isinstance(found, Footprint):
        with contextlib.suppress(OSError):  # a missing cache costs seconds, not the run
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(found.to_dict(), indent=1) + "\n")
    return found


def load(file: Path) -> Footprint | None:
    """Returns the footprint in a file; None if the file is missing or unreadable."""
    try:
        return Footprint.from_dict(json.loads(text_of(file)))
    except (OSError, ValueError, RecursionError):
        return None


def digest(model: nn.Module, task: Task, samples: int) -> str:
    """Returns 16 hex digits that depend on everything a footprint depends on. Weights don't count."""
    optimizer = task.make_optimizer(model)
    tensors = [*model.named_parameters(), *model.named_buffers(), *enumerate(batches.tensors(task.make_batch(2)))]
    content = {
        "torch": torch.__version__,
        "engine": [_file_digest(file) for files in _REHEARSED for file in sorted(project.ENGINE.glob(files))],
        "model": [(name, _described(module)) for name, module in model.named_modules()],
        "tensors": [(name, list(each.shape), str(each.dtype), each.requires_grad) for name, each in tensors],
        "code": _code([*model.modules(), *task.shaped_by, optimizer]),
        "shaped by": [_described(each) for each in task.shaped_by],
        "optimizer": [_class_name(optimizer), [_options(group) for group in optimizer.param_groups]],
        "features": None if task.features is None else [task.features.num_rows, task.features.bytes],
        "training": [task.precision, task.checkpointed, task.feature_mode, task.compile_mode, samples],
        "memory format": task.channels_last,
        "allocator": [task.expandable_segments, task.cudnn_workspaces],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an optimizer's group. Floats count only as zero or not, which decides what is computed."""
    return {
        name: len(value) if name == "params" else bool(value) if isinstance(value, float) else repr(value)
        for name, value in group.items()
    }


def _described(thing: object) -> str:
    """Returns the class and the object's own attributes, such as sizes and probabilities; no submodules."""
    hidden = _MACHINERY if isinstance(thing, nn.Module) else ()
    own = _own((each for each in _attributes(thing) if each[0] not in hidden), DEPTH)
    return f"{_class_name(thing)} {own}"


def _own(attributes: Iterable[tuple[str, Any]], depth: int) -> list[str]:
    texts = (f"{name}={_text(value, depth)}" for name, value in attributes)
    return [text for text in texts if " at 0x" not in text]


def _class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for base in type(thing).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def _text(value: object, depth: int) -> str:
    """Returns a few thousand characters at most about a value, without large contents."""
    if isinstance(value, (Tensor, np.ndarray)):
        is_weight = isinstance(value, Tensor) and (value.is_meta or value.requires_grad)
        is_told = not is_weight and int(np.prod(value.shape)) <= MOST_ITEMS
        values = repr(value.tolist())[:MOST_CHARACTERS] if is_told else ""
        return f"{_class_name(value)} {tuple(value.shape)} {value.dtype} {values}"
    if isinstance(value, (str, bytes)):
        return f"{len(value)} {value[:MOST_CHARACTERS]!r}"
    if isinstance(value, (type, ModuleType)) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    if depth == 0 or isinstance(value, nn.Module):  # a module has its own entries in the digest
        return _class_name(value)
    if isinstance(value, (set, frozenset)):  # their order varies
        return f"{len(value)} {sorted(_text(each, depth - 1) for each in value) if len(value) <= MOST_ITEMS else ''}"
    if isinstance(value, (Mapping, list, tuple)):
        # The pairs of a mapping are tuples, which count as a level.
        items, below = (value.items(), depth) if isinstance(value, Mapping) else (value, depth - 1)
        return f"{_class_name(value)} {len(value)} {[_text(each, below) for each in islice(items, MOST_ITEMS)]}"
    own = _own(islice(_attributes(value), MOST_ITEMS), depth - 1)
    if own or type(value).__repr__ is object.__repr__:
        return f"{_class_name(value)} {own}"
    return repr(value)[:MOST_CHARACTERS]


def _code(things: Iterable[object]) -> list[str]:
    """Returns digests of the files that define the classes and their bases, and of other loaded modules of their code.

    These are modules of the project, and of the same package, or of the same folder if there is no package. Installed
    packages are left out.
    """
    names = {base.__module__ for each in things for base in type(each).__mro__ if _top(base.__module__) != "torch"}
    files = {_file(name) for name in names}
    for top in {_top(name) for name in names} - _NOT_THEIRS - sys.stdlib_module_names:
        home = _file(top)
        if home is not None and not INSTALLED.isdisjoint(home.parts):
            continue
        folder = None if home is None or hasattr(sys.modules[top], "__path__") else home.parent
        for name in [*sys.modules]:
            file = _file(name)
            if file is not None and _top(name) not in _NOT_THEIRS and (_top(name) == top or file.parent == folder):
                files.add(file)
    with contextlib.suppress(ConfigError):  # there is no project
        own = project.sources()
        found = (_file(name) for name in [*sys.modules] if _top(name) not in _NOT_THEIRS)
        files |= {file for file in found if file is not None and file.is_relative_to(own)}
    return sorted(_file_digest(file) for file in files if file is not None)


def _file(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if isinstance(file, str) and file.endswith(".py") and Path(file).is_file() else None


def _file_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _top(module: str) -> str:
    return module.partition(".")[0]
