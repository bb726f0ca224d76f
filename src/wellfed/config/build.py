"""Builds the objects that a configuration names, with ``hydra.utils.instantiate``; imports their modules.

Targets get plain lists and dicts, as with ``_convert_: all``, unless a node sets ``_convert_`` itself. Hydra's own
default would put ListConfigs into hyperparameters and optimizer states, and weights-only loading refuses these.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import traceback
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from wellfed.config.faults.explain_refusal import nearest
from wellfed.config.hydra_internals import locate
from wellfed.config.hydra_session import as_written
from wellfed.errors import ConfigError, Fault, WellfedError, first_line, is_the_users
from wellfed.extras import absence, absent_package

TARGET, POSITIONAL, PARTIAL, RECURSIVE = "_target_", "_args_", "_partial_", "_recursive_"
KEYS = frozenset({TARGET, POSITIONAL, PARTIAL, RECURSIVE, "_convert_"})
"""Keys of ``hydra.utils.instantiate``; all others are arguments."""
_LISTED = 8
"""Maximum number of names in a message."""


def build(node: Any, where: str, /, *args: Any, **runtime: Any) -> Any:
    """Builds what ``node`` describes: a `_target_` with its arguments, or a list or mapping of such nodes.

    Args:
        node: plain values, with any keys of ``hydra.utils.instantiate``.
        where: dotted name of the node, for messages.
        args: passed after ``_args_``, not copied.
        runtime: keyword arguments, not copied; they replace entries of the same name.

    Raises:
        ConfigError: a target can't be imported or called, its package is not installed, or it refuses its arguments
            (ValueError, TypeError). Other errors of its code are raised unchanged.
    """
    is_later = bool(args or runtime)
    try:
        if isinstance(node, Mapping):
            given = {key: value for key, value in node.items() if key not in runtime}
            made = instantiate({"_convert_": "all", **given} | ({PARTIAL: True} if is_later else {}))
        else:
            made = instantiate(node, _convert_="all")
        return made(*args, **runtime) if is_later else made
    except Exception as error:  # noqa: BLE001  of the user's code, which Hydra wraps
        problem = _explained(node, where, error)
    raise problem  # here, so that it has no context


def _explained(node: Any, where: str, error: Exception) -> BaseException:
    """Returns the error of the user's code, or a ConfigError that explains it."""
    if in_node := re.search(r"\nfull_key: (\S+)", str(error)):
        where += in_node[1] if in_node[1].startswith("[") else f".{in_node[1]}"
    named = re.search(r"target '([\w.]+)'", str(error))
    target = named[1] if named else str(node.get(TARGET)) if isinstance(node, Mapping) else "a target"
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(error, InstantiationException) and str(error).startswith("Error locating target"):
        return ConfigError([import_fault(where, target, cause)])
    if isinstance(cause, ModuleNotFoundError) and absent_package(cause) is not None:
        return ConfigError([import_fault(where, target, cause)])
    is_about_plain = "OmegaConf config object" in str(cause) or (
        isinstance(cause, AttributeError) and re.search(r"'(dict|list)' object has no attribute", str(cause))
    )
    of_arguments = (ValueError, TypeError, InstantiationException, OmegaConfBaseException)
    if isinstance(cause, WellfedError) or not (is_about_plain or isinstance(cause, of_arguments)):
        return cause
    way_out = f"Change {where}.*"
    if is_about_plain:
        way_out = f"It got a plain dict or list; +{where}._convert_=none hands over DictConfig and ListConfig."
    elif isinstance(cause, (ValueError, TypeError)) and (texts := list(_numbers_as_text(node, where))):
        way_out = " ".join(texts)
    refused = ConfigError.of(where, f"{target} refuses its arguments: {first_line(cause)}{_line(cause)}", way_out)
    refused.__cause__ = cause
    return refused


def _line(error: BaseException) -> str:
    """Returns file and line of the user's code that raised, in brackets; empty if no code of the user did."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if is_the_users(one.filename)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _numbers_as_text(node: Any, where: str) -> Iterator[str]:
    """Yields a sentence for each argument that is a text which reads as a number."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if isinstance(value, str) and key not in KEYS and is_number(value):
            yield about_text(f"{where}.{key}", value)


def is_number(text: str) -> bool:
    """Returns whether yaml reads a text as a number or a boolean."""
    try:
        return isinstance(yaml.safe_load(text), (int, float)) or bool(re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", text))
    except yaml.YAMLError:
        return False


def about_text(name: str, value: str) -> str:
    """Returns where the text of an argument comes from, and how to make it a number."""
    written = as_written(name)
    if "${" not in written:
        return f"{name} is the text '{value}': write {value} without quotes."
    inner = re.search(r"\$\{oc\.env:[^{}]*\}", written)
    decoded = f"${{oc.decode:{inner[0] if inner else written}}}"
    return f"{name} is the text '{value}', by {written}; oc.env gives text. Write {decoded} for a number."


def import_fault(where: str, target: str, error: BaseException) -> Fault:
    """Returns the fault of a target that can't be imported: a package to install, a near name, or the file to mend.

    Raises:
        Exception: ``error`` itself, if the code of an imported module raised another kind.
    """
    cause = error.__cause__ or error
    typed, way_out = f"{where}.{TARGET}={target}", "Name a class or function of a module on the path."
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        optional = absent_package(cause)
        if optional or not target.startswith(cause.name):
            return Fault(typed, *absence(optional or cause.name))
    elif isinstance(cause, (SyntaxError, UnicodeDecodeError)):
        line = f":{cause.lineno}" if isinstance(cause, SyntaxError) else ""
        return Fault(typed, f"{getattr(cause, 'filename', '')}{line} is not Python: {cause}.", "Mend the file.")
    elif isinstance(cause, ImportError) and _line(cause):
        return Fault(typed, f"can't be imported: {first_line(cause)}{_line(cause)}.", "Mend that import.")
    elif not isinstance(cause, (ImportError, AttributeError, ValueError)) or _line(cause):
        raise cause
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner = locate(".".join(parts[:count]))
        except (ImportError, ValueError):
            continue
        names = {*dir(owner), *(each.name for each in pkgutil.iter_modules(getattr(owner, "__path__", ())))}
        is_class = parts[count][:1].isupper()
        near = nearest(parts[count], sorted(n for n in names if n[:1] != "_" and n[:1].isupper() == is_class))
        if near:
            way_out = f"Did you mean {where}.{TARGET}={'.'.join([*parts[:count], near, *parts[count + 1 :]])}?"
        return Fault(typed, f"{'.'.join(parts[:count])} has no {parts[count]}.", way_out)
    return Fault(typed, f"can't be imported: {first_line(cause)}.", way_out)


def uncallable_fault(where: str, target: str, found: Any) -> Fault:
    """Returns the fault of a target that is a module or a value."""
    typed = f"{where}.{TARGET}={target}"
    if not isinstance(found, ModuleType):
        way_out = f"Name a class or function. A value is read by {TARGET}: hydra.utils.get_object, path: {target}."
        return Fault(typed, f"is no class or function, but a {type(found).__name__}.", way_out)
    names = [name for name, value in vars(found).items() if inspect.getmodule(value) is found and name[:1] != "_"]
    way_out = f"Name one of those in it: {', '.join(names[:_LISTED])}." if names else "Name a class or function."
    return Fault(typed, "it is a module.", way_out)
