"""Help texts of the knobs: the string literals under the fields of the schema."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wellfed.config import schema
from wellfed.config.faults.knobs import type_of


@cache
def _literals() -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    return {node.name: _field_texts(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_texts(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def help_of(dotted: str, schema_type: type = schema.RunConfig) -> str:
    """The help text of a knob or group, on one line; empty where the schema says nothing (free arguments).

    >>> help_of("loader.num_workers").startswith("Producers")
    True
    """
    *groups, name = dotted.split(".")
    owner: Any = schema_type
    for group in groups:
        owner = type_of(owner, group)
        if not is_dataclass(owner):
            return ""
    return _literals().get(owner.__name__, {}).get(name, "")


def undocumented(schema_type: type = schema.RunConfig) -> list[str]:
    """Fields of a schema class, as ``Class.field``, that have no help text; nested classes too."""
    bare = []
    for entry in fields(schema_type):
        if not _literals().get(schema_type.__name__, {}).get(entry.name):
            bare.append(f"{schema_type.__name__}.{entry.name}")
        inner = type_of(schema_type, entry.name)
        if is_dataclass(inner) and isinstance(inner, type):
            bare += undocumented(inner)
    return bare
