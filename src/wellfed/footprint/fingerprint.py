"""Describes what an object is and holds, as texts for a digest: sizes and settings, no big contents or addresses."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

DEPTH = 3
"""Of objects within objects; below it only a name counts."""
MOST_ITEMS = 64
"""Of a list, a mapping or an array; of more their number, and the first."""
MOST_CHARACTERS = 1000
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_NOT_THEIRS = frozenset({"torch", "wellfed", "builtins", "__main__"})
"""Of torch the version says all; of ours and of a script, which modules are loaded depends on the command."""


def described(thing: object) -> tuple[str, dict[str, str]]:
    """The class, and what its own attributes say (sizes, probabilities, configurations); of a module not its parts."""
    hides = isinstance(thing, nn.Module)
    own = {name: _text(value, DEPTH) for name, value in _attributes(thing) if not (hides and name in _MACHINERY)}
    return class_name(thing), {name: text for name, text in own.items() if " at 0x" not in text}


def class_name(thing: object) -> str:
    """With its module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for base in type(thing).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def _text(value: object, depth: int) -> str:
    """At most a few thousand characters; of what has no attributes its repr."""
    if isinstance(value, (Tensor, np.ndarray)):
        few = isinstance(value, np.ndarray) or not (value.is_meta or value.requires_grad)  # weights do not count
        size = value.size if isinstance(value, np.ndarray) else value.numel()
        values = _values(value) if few and size <= MOST_ITEMS else ""
        return f"{class_name(value)} {tuple(value.shape)} {value.dtype} {values}"
    if isinstance(value, (str, bytes)):
        return f"{len(value)} {value[:MOST_CHARACTERS]!r}"
    if isinstance(value, (type, ModuleType)) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    if depth == 0:
        return class_name(value)
    if isinstance(value, Mapping):
        items = [f"{_text(key, depth - 1)}: {_text(each, depth - 1)}" for key, each in _first(value.items())]
        return f"{class_name(value)} {len(value)} {items}"
    if isinstance(value, (set, frozenset)):  # in no order that lasts
        return f"{len(value)} {sorted(_text(each, depth - 1) for each in value) if len(value) <= MOST_ITEMS else ''}"
    if isinstance(value, (list, tuple)):
        return f"{class_name(value)} {len(value)} {[_text(each, depth - 1) for each in _first(value)]}"
    if isinstance(value, nn.Module):  # its tensors and parts are told elsewhere, or are not looked at
        return class_name(value)
    if (own := [f"{name}={_text(each, depth - 1)}" for name, each in _first(_attributes(value))]) or _is_plain(value):
        return f"{class_name(value)} {[text for text in own if ' at 0x' not in text]}"
    return repr(value)[:MOST_CHARACTERS]


def _first(items: Iterable[Any]) -> Iterator[Any]:
    return (each for each, _ in zip(items, range(MOST_ITEMS), strict=False))


def _values(value: Any) -> str:
    return repr(value.tolist())[:MOST_CHARACTERS]


def _is_plain(value: object) -> bool:
    return type(value).__repr__ is object.__repr__


def code(things: Iterable[object]) -> list[str]:
    """Digests of the files that define the classes and their bases, and of loaded modules beside them.

    Beside a class is its package, or the folder of a module that is in none; of what is installed, nothing.
    """
    classes = {base for each in things for base in type(each).__mro__ if _top(base.__module__) != "torch"}
    files = set(filter(None, map(_source, classes)))
    tops = {_top(each.__module__) for each in classes} - _NOT_THEIRS
    for top in tops:
        files |= _beside(top)
    return sorted(file_digest(file) for file in files)


def file_digest(file: Path) -> str:
    """Of all its bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _source(class_: type) -> Path | None:
    with contextlib.suppress(TypeError, OSError):  # made in a console, or not in Python
        if file := inspect.getsourcefile(class_):
            return Path(file)
    return None


def _beside(top: str) -> set[Path]:
    home = _file(sys.modules.get(top))
    is_package = hasattr(sys.modules.get(top), "__path__")
    if (home is not None and {"site-packages", "dist-packages"} & set(home.parts)) or top in sys.stdlib_module_names:
        return set()
    found = set()
    for name, module in [*sys.modules.items()]:
        file = _file(module)
        if file is None or _top(name) in _NOT_THEIRS:
            continue
        if _top(name) == top or (not is_package and home is not None and file.parent == home.parent):
            found.add(file)
    return found


def _file(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) and file.endswith(".py") and Path(file).is_file() else None


def _top(module: str) -> str:
    return module.partition(".")[0]
