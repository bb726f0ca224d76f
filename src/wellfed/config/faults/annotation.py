"""Whether a plain yaml value fits an annotation, where the annotation is simple enough to tell."""

from __future__ import annotations

import ast
import enum
import inspect
import types
import typing
from collections.abc import Mapping
from inspect import Parameter
from typing import Any

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
_LISTS = frozenset({"list", "List", "tuple", "Tuple", "Sequence"})
_MAPPINGS = frozenset({"dict", "Dict", "Mapping"})
_NEVER_IN_YAML = frozenset({"Tensor", "Parameter", "Module", "Generator", "Callable", "Dataset", "ParamsT"})
"""Members of a union that a yaml value can't be: ``float | Tensor`` is a float there."""

Shape = tuple[str, Any]
"""(what, detail): one alternative that an annotation allows."""


def misfit(value: Any, parameter: Parameter) -> str:
    """What is wrong with ``value`` for ``parameter`` (annotated by an ast node or a type); empty if it may fit."""
    annotation = parameter.annotation
    if annotation is Parameter.empty or isinstance(value, Mapping):
        return ""
    shapes = _shapes_of_node(annotation) if isinstance(annotation, ast.expr) else _shapes_of_type(annotation)
    if shapes is None or (value is None and parameter.default in (None, "None")):
        return ""
    if any(_fits(value, shape) for shape in shapes):
        return ""
    return f"must be {' or '.join(dict.fromkeys(_say(shape) for shape in shapes))}."


def _fits(value: Any, shape: Shape) -> bool:
    what, detail = shape
    if what == "literal":
        return any(value == option and type(value) is type(option) for option in detail)
    if what == "list":
        return isinstance(value, (list, tuple))
    if what == "mapping":
        return isinstance(value, Mapping)
    if detail is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if detail is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, detail)


def _say(shape: Shape) -> str:
    what, detail = shape
    if what == "literal":
        return "one of " + ", ".join(str(option) for option in detail)
    if what == "list":
        return "a list [..]"
    if what == "mapping":
        return "a mapping {..}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return words[detail]


def _shapes_of_node(node: ast.expr) -> list[Shape] | None:
    """The alternatives of an annotation in source; None where it can't be judged."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _shapes_of_node(ast.parse(node.value, mode="eval").body)
        except SyntaxError:
            return None
    if isinstance(node, ast.Constant) and node.value is None:
        return [("simple", type(None))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _joined([_or_never(part) for part in (node.left, node.right)])
    name = _name(node)
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Optional":
            return _joined([_shapes_of_node(node.slice), [("simple", type(None))]])
        if name == "Union":
            return _joined([_or_never(part) for part in parts])
        if name == "Literal":
            return [("literal", tuple(part.value for part in parts if isinstance(part, ast.Constant)))]
    return _shapes_of_name(name)


def _or_never(node: ast.expr) -> list[Shape] | None:
    return [] if _name(node) in _NEVER_IN_YAML else _shapes_of_node(node)


def _joined(parts: list[list[Shape] | None]) -> list[Shape] | None:
    if any(part is None for part in parts):
        return None
    return [shape for part in parts for shape in part or []] or None


def _shapes_of_name(name: str) -> list[Shape] | None:
    if name in _SIMPLE:
        return [("simple", _SIMPLE[name])]
    if name in _LISTS:
        return [("list", None)]
    return [("mapping", None)] if name in _MAPPINGS else None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _shapes_of_type(annotation: Any) -> list[Shape] | None:
    """The same for an annotation of imported code: a type, or text under ``from __future__ import annotations``."""
    if isinstance(annotation, str):
        try:
            return _shapes_of_node(ast.parse(annotation, mode="eval").body)
        except SyntaxError:
            return None
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [p for p in typing.get_args(annotation) if getattr(p, "__name__", "") not in _NEVER_IN_YAML]
        return _joined([_shapes_of_type(part) for part in parts])
    if origin is typing.Literal:
        return [("literal", typing.get_args(annotation))]
    if annotation is None or annotation is type(None):
        return [("simple", type(None))]
    bare = origin or annotation
    if inspect.isclass(bare) and not issubclass(bare, enum.Enum):
        return _shapes_of_name(bare.__name__) if bare.__module__ in ("builtins", "collections.abc") else None
    return None
