"""Tells whether a plain yaml value fits an annotation, where the annotation is simple enough to tell."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import Any

from wellfed.config.faults.source import last_word

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None), "NoneType": type(None)}
_LISTS = frozenset({"list", "List", "tuple", "Tuple", "Sequence"})
_MAPPINGS = frozenset({"dict", "Dict", "Mapping"})
_NEVER_IN_YAML = frozenset({"Tensor", "Parameter", "Module", "Generator", "Callable", "Dataset", "ParamsT"})
"""Members of a union that a yaml value can't be: ``float | Tensor`` is a float there."""
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    list: "a list [..]",
    dict: "a mapping {..}",
}

Kind = type | tuple[Any, ...]
"""One alternative that an annotation allows: a type, or the values of a Literal."""


def misfit(value: Any, parameter: Parameter) -> str:
    """What is wrong with ``value`` for ``parameter`` (annotated by text or a type); empty if it may fit."""
    annotation = parameter.annotation
    if annotation is Parameter.empty or isinstance(value, Mapping) or (value is None and parameter.default is None):
        return ""
    kinds = _kinds_of_text(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    if kinds is None or any(_fits(value, kind) for kind in kinds):
        return ""
    return f"must be {' or '.join(dict.fromkeys(_say(kind) for kind in kinds))}."


def _fits(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return any(value == option and type(value) is type(option) for option in kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else (list, tuple) if kind is list else kind)


def _say(kind: Kind) -> str:
    return "one of " + ", ".join(map(str, kind)) if isinstance(kind, tuple) else _WORDS[kind]


def _kinds_of_text(text: str) -> list[Kind] | None:
    try:
        return _kinds(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return None


def _kinds(node: ast.expr) -> list[Kind] | None:
    """The alternatives of an annotation; None where it can't be judged."""
    name = last_word(node)
    match node:
        case ast.Constant(value=str() as quoted):
            return _kinds_of_text(quoted)
        case ast.Constant(value=None):
            return [type(None)]
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _union([left, right])
        case ast.Subscript(slice=inner) if name in ("Optional", "Union", "Literal"):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name == "Literal":
                return [tuple(part.value for part in parts if isinstance(part, ast.Constant))]
            return _union([*parts, ast.Constant(None)] if name == "Optional" else parts)
    if name in _SIMPLE:
        return [_SIMPLE[name]]
    return [list] if name in _LISTS else [dict] if name in _MAPPINGS else None


def _union(parts: Iterable[ast.expr]) -> list[Kind] | None:
    kinds: list[Kind] = []
    for part in parts:
        if last_word(part) not in _NEVER_IN_YAML:
            alternatives = _kinds(part)
            if alternatives is None:
                return None
            kinds += alternatives
    return kinds or None
