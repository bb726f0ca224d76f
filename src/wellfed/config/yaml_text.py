"""Plain values as yaml that OmegaConf reads back as the same values; written by libyaml, where there is one.

OmegaConf's own way takes 30 ms for the files of one run: a sweep has one such run after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import CDumper as _Base
else:
    _Base = getattr(yaml, "CDumper", yaml.Dumper)

_WORDS = frozenset({"y", "yes", "n", "no", "true", "false", "on", "off"})
"""Booleans to some reader of yaml."""


def to_yaml(tree: Any) -> str:
    """Mappings keep their order; texts that a reader could take for a number or a boolean are quoted."""
    text: str = yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


class _Dumper(_Base):
    pass


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
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


_Dumper.add_representer(str, _text)
