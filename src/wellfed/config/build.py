"""Builds the objects that a configuration names, with ``hydra.utils.instantiate``; imports their modules.

Targets get plain lists and dicts, as with ``_convert_: all``, unless a node sets ``_convert_`` itself. Hydra's own
default would put ListConfigs into hyperparameters and optimizer states, and weights-only loading refuses these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from wellfed.config.faults.target_faults import KEYS, PARTIAL, TARGET, about_text, import_fault, is_number, line_of
from wellfed.errors import ConfigError, WellfedError, first_line
from wellfed.extras import absent_package


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
    is_missing = isinstance(cause, ModuleNotFoundError) and absent_package(cause) is not None
    if is_missing or (isinstance(error, InstantiationException) and str(error).startswith("Error locating target")):
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
    elif isinstance(cause, TypeError) and (missing := re.search(r" missing \d+ required .*: (.*)", str(cause))):
        names = re.findall(r"'(\w+)'", missing[1])
        way_out = f"Add {' '.join(f'+{where}.{name}=<value>' for name in names)}"
    elif isinstance(cause, (ValueError, TypeError)) and (texts := list(_numbers_as_text(node, where))):
        way_out = " ".join(texts)
    refused = ConfigError.of(where, f"{target} refuses its arguments: {first_line(cause)}{line_of(cause)}", way_out)
    refused.__cause__ = cause
    return refused


def _numbers_as_text(node: Any, where: str) -> Iterator[str]:
    """Yields a sentence for each argument that is a text which reads as a number."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if isinstance(value, str) and key not in KEYS and is_number(value):
            yield about_text(f"{where}.{key}", value)
