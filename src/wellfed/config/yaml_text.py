"""Plain values as yaml that OmegaConf reads back as the same values; written by libyaml, where there is one.

OmegaConf's own way takes 30 ms for the files of one run: a sweep has one such run after the other.
"""

from __future__ import annotations

from typing import Any

import yaml

_WORDS = frozenset({"y", "yes", "n", "no", "true", "false", "on", "off"})
"""Booleans to some reader of yaml."""


def to_yaml(tree: Any) -> str:
    """Mappings keep their order; texts that a reader could take for a number or a boolean are quoted."""
    try:
        return _written(tree, _Fast)
    except UnicodeEncodeError:  # a name that is no UTF-8: libyaml has no way to write it
        return _written(tree, _Plain)


def _written(tree: Any, dumper: type[yaml.Dumper]) -> str:
    text: str = yaml.dump(tree, Dumper=dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


class _Plain(yaml.Dumper):
    pass


class _Fast(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
    pass


def _text(dumper: Any, text: str) -> yaml.ScalarNode:
    style = "'" if text.lower() in _WORDS or _is_number(text) else None
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


def _is_number(text: str) -> bool:
    """By OmegaConf, to which more is a number than to yaml: 1e5."""
    try:
        float(text)
    except ValueError:
        return False
    return True


for _dumper in (_Plain, _Fast):
    _dumper.add_representer(str, _text)
