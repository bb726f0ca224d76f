"""Builds the objects that a configuration names, and imports their modules (torch included)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any

from wellfed.errors import ConfigError, Fault
from wellfed.extras import absence, absent_package

TARGET = "_target_"
POSITIONAL = "_args_"
PARTIAL = "_partial_"


class NotThere(ImportError):
    """Raised for a name that a module or class lacks; ``names`` are its public names."""

    def __init__(self, owner: str, found: Any, name: str) -> None:
        super().__init__(f"{owner} has no {name}", name=name)
        names = {*dir(found), *(each.name for each in pkgutil.iter_modules(getattr(found, "__path__", ())))}
        self.names = sorted(each for each in names if not each.startswith("_"))


def locate(target: str) -> Any:
    """Imports the object with a dotted name and returns it.

    Raises:
        NotThere: a module or class lacks the next part of the name.
        ImportError, SyntaxError, UnicodeDecodeError: importing failed.
    """
    name, *rest = target.split(".")
    found: Any = importlib.import_module(name)
    for part in rest:
        owner, name = name, f"{name}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif hasattr(found, "__path__") and importlib.util.find_spec(name) is not None:  # also without __init__.py
            found = importlib.import_module(name)
        else:
            raise NotThere(owner, found, part)
    return found


def build(node: Mapping[str, Any], where: str, /, *args: Any, **runtime: Any) -> Any:
    """Builds the object that ``node`` describes: calls its `_target_` with its other entries, nested nodes first.

    Arguments reach the target as they are. ``hydra.utils.instantiate`` would copy each one deeply and read dataclasses
    as configurations, which breaks datasets and tensors.

    Args:
        node: plain values; ``_args_`` (a list) and ``_partial_: true`` mean what they mean in Hydra.
        where: dotted name of the node, for the message.
        args: passed before ``_args_``.
        runtime: keyword arguments; they replace entries of the same name.

    Raises:
        ConfigError: the target can't be imported, its package is not installed, or it refuses its arguments
            (ValueError, TypeError).
    """
    target = node.get(TARGET)
    if not isinstance(target, str):
        raise ConfigError.of(where, "names nothing to build.", f"Set {where}.{TARGET}=<module>.<name>.")
    positional = [*args, *built(node.get(POSITIONAL, []), f"{where}.{POSITIONAL}")]
    given = {key: value for key, value in node.items() if key not in (TARGET, POSITIONAL, PARTIAL, *runtime)}
    named = built(given, where) | runtime
    try:
        make = locate(target)
    except ImportError as error:
        raise ConfigError([import_fault(where, target, error)]) from error
    if node.get(PARTIAL):
        return functools.partial(make, *positional, **named)
    try:
        return make(*positional, **named)
    except ModuleNotFoundError as error:
        if absent_package(error) is None:
            raise
        raise ConfigError([import_fault(where, target, error)]) from error
    except (ValueError, TypeError) as error:
        raise ConfigError.of(where, f"{target} refuses its arguments: {error}", f"Change {where}.*") from error


def import_fault(where: str, target: str, error: ImportError) -> Fault:
    """Returns the fault of a failed import of ``target``, with the package to install if one is missing."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        optional = absent_package(error)
        if optional or not target.startswith(error.name):
            return Fault(f"{where}.{TARGET}={target}", *absence(optional or error.name))
    way_out = "Name a class or function of a module on the path."
    return Fault(f"{where}.{TARGET}={target}", f"can't be imported: {error}.", way_out)


def built(value: Any, where: str) -> Any:
    """Builds each node of a value that names a `_target_`; raises as `build`."""
    if isinstance(value, Mapping):
        if TARGET in value:
            return build(value, where)
        return {key: built(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [built(item, f"{where}[{i}]") for i, item in enumerate(value)]
    return value
