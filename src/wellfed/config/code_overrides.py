"""Finds overrides that can name code. Those of a record are used only if they are typed again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.core.override_parser.types import QuotedString

from wellfed.config.build import TARGET
from wellfed.config.faults.override_faults import read_overrides

_LOADS_CODE = (TARGET, "trust_remote_code", "weights_only", "use_kernels")
"""Names under which a value names code, or lets transformers run the code of a model's folder."""
_KERNEL = re.compile(r"attn_implementation.*/", re.DOTALL)
"""A kernel on the hub, which transformers downloads and imports."""
_CONFIGURES = {"config", "hydra"}
"""Groups that choose the packages and folders that code and options come from."""
_REFERENCE = re.compile(r"\$\{(?:[\w.\[\]@-]+|(?:oc\.env|now|hydra):[^${}]*)\}")
"""Interpolations that give a value of the configuration, or a text. Other resolvers can assemble any node."""
_OUTSIDE = re.compile(r"(^|[/\\])\.\.([/\\]|$)|^[/\\]|\$\{")
"""Values of a group that lead, or may lead, out of the folders of options."""


def names_code(text: str) -> bool:
    """Returns whether an override can name a class, function, package or folder of options to load.

    An override that Hydra can't read is not one, since it is refused.
    """
    if text.startswith("-") or any(name in text for name in _LOADS_CODE) or _KERNEL.search(text) or _assembles(text):
        return True
    (typed,) = read_overrides([text], multirun=True)
    if typed.parsed is None:
        return False
    key, package = typed.parsed.key_or_group, typed.parsed.package or ""
    if re.split("[./]", key)[0] in _CONFIGURES or not _CONFIGURES.isdisjoint(package.split(".")):
        return True
    value: Any = typed.parsed._value
    texts = [*_texts(value)]  # without Hydra's escapes
    can_choose = "." not in key and not isinstance(value, dict)
    return any(map(_assembles, texts)) or (can_choose and any(map(_OUTSIDE.search, texts)))


def _assembles(text: str) -> bool:
    return "${" in _REFERENCE.sub("", text)


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts of a parsed value, with its keys."""
    if isinstance(value, QuotedString):
        yield value.text
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
