"""Finds the class or function behind a dotted name in source files, by ast: nothing is imported.

Follows re-exports (``from .adamw import AdamW``, ``from x import *``, ``Y = X``). What only running the code would
tell (C functions, ``__getattr__``, names bound twice) is `Unread`.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MAX_HOPS = 25
"""Longest chain of re-exports that is followed."""


class Unread(Exception):
    """The source does not say; the reason is the message."""


class NotThere(Exception):
    """The source says that there is no such module or name; ``names`` are those that are there."""

    def __init__(self, owner: str, name: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"{owner} has no {name}" if owner else f"there is no module {name}")
        self.name = name
        self.names = tuple(names)


@dataclass(frozen=True)
class Module:
    """A module that is not imported."""

    name: str
    spec: ModuleSpec

    @property
    def source(self) -> Source:
        """What is written in it."""
        if self.spec.origin is None:  # a namespace package: a folder without __init__.py
            return Source(ast.Module(body=[], type_ignores=[]))
        if not self.spec.origin.endswith(".py"):
            raise Unread(f"{self.name} is not written in Python")
        return _parsed(self.spec.origin)

    def submodule(self, name: str) -> Module | None:
        """The module of that name within this package."""
        if self.spec.submodule_search_locations is None:
            return None
        # By its own name alone: a folder without __init__.py would look its parent up among the imported modules.
        found = PathFinder.find_spec(name, list(self.spec.submodule_search_locations))
        if found is None:
            return None
        if found.submodule_search_locations is not None:
            found.submodule_search_locations = list(found.submodule_search_locations)
        return Module(f"{self.name}.{name}", found)

    def named_in(self, statement: ast.ImportFrom) -> Module:
        """The module that a ``from ... import`` in this one names."""
        package = self.name.split(".")
        above = statement.level - (self.spec.submodule_search_locations is not None)
        base = package[: len(package) - above] if statement.level else []
        return module_named(".".join([*base, *([statement.module] if statement.module else [])]))


@dataclass(frozen=True)
class Source:
    """A file of Python."""

    tree: ast.Module

    @cached_property
    def bound(self) -> Mapping[str, list[ast.stmt]]:
        """Name -> the statements that bind it when the file is run."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in _statements(self.tree.body):
            for name in _bound_names(statement):
                found.setdefault(name, []).append(statement)
        return found

    @cached_property
    def stars(self) -> list[ast.ImportFrom]:
        """``from x import *``."""
        imports = (one for one in _statements(self.tree.body) if isinstance(one, ast.ImportFrom))
        return [one for one in imports if one.names[0].name == "*"]

    @cached_property
    def computes_names(self) -> bool:
        """Whether names may appear in it that no statement shows."""
        calls = (node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return "__getattr__" in self.bound or any(
            isinstance(func, ast.Name) and func.id in ("globals", "exec", "setattr") for func in calls
        )


@dataclass(frozen=True)
class Definition:
    """A class or function, and the module that it is written in."""

    module: Module
    node: ast.ClassDef | ast.FunctionDef


def module_named(dotted: str) -> Module:
    """The module of that name.

    Raises:
        NotThere: there is none.
    """
    first, *rest = dotted.split(".")
    spec = importlib.util.find_spec(first)
    found = Module(first, spec) if spec else None
    for part in rest:
        found = found.submodule(part) if found else None
    if found is None:
        raise NotThere("", dotted)
    return found


def find(start: Module, parts: Sequence[str], allowed: Sequence[str] | None) -> Definition:
    """The class or function ``parts[-1]`` that the other parts lead to from ``start``.

    Args:
        allowed: packages that modules on the way may belong to; None = any.

    Raises:
        NotThere: no such module or name.
        Unread: ast can't tell.
        PermissionError: the name leads through a module outside ``allowed``.
    """
    found: Module | Definition = start
    for number, part in enumerate(parts, start=1):
        if isinstance(found, Definition):
            raise Unread(f"{found.node.name} is not a module")
        # All but the last part must be modules: a module comes before what the package binds to the same name.
        inner = found.submodule(part) if number < len(parts) else None
        found = inner or _member(found, part, allowed, 0)
    if isinstance(found, Module):
        raise NotThere(found.name, "class or function named after it: it is a module")
    return found


def _member(module: Module, name: str, allowed: Sequence[str] | None, hops: int) -> Module | Definition:
    """What ``module.name`` is in the end."""
    if hops > _MAX_HOPS:
        raise Unread(f"{module.name}.{name} is passed on too often")
    statements = module.source.bound.get(name, [])
    if not statements:
        return module.submodule(name) or _from_stars(module, name, allowed, hops)
    if len(statements) > 1:  # try: import x; version switches
        raise Unread(f"{module.name}.{name} is bound {len(statements)} times")
    match statements[0]:
        case ast.FunctionDef() | ast.ClassDef() as node:
            return Definition(module, node)
        case ast.Import(names=names):
            alias = next(one for one in names if name in (one.asname, one.name.partition(".")[0]))
            return _passed(module_named(_checked(alias.name if alias.asname else name, allowed)), allowed)
        case ast.ImportFrom() as statement:
            original = next(one.name for one in statement.names if name in (one.asname, one.name))
            source = module.named_in(statement)
            return _passed(source.submodule(original) or _member(source, original, allowed, hops + 1), allowed)
        case ast.Assign(value=ast.Name(id=other)):
            return _member(module, other, allowed, hops + 1)
    raise Unread(f"{module.name}.{name} is computed")


def _passed(found: Module | Definition, allowed: Sequence[str] | None) -> Module | Definition:
    if isinstance(found, Module):
        _checked(found.name, allowed)
    return found


def _checked(module: str, allowed: Sequence[str] | None) -> str:
    if allowed is not None and not any(f"{module}.".startswith(f"{package}.") for package in allowed):
        raise PermissionError(module)
    return module


def _from_stars(module: Module, name: str, allowed: Sequence[str] | None, hops: int) -> Module | Definition:
    names = [*module.source.bound]
    for statement in module.source.stars:
        try:
            return _member(module.named_in(statement), name, allowed, hops + 1)
        except NotThere as missing:
            names += missing.names
    if module.source.computes_names:
        raise Unread(f"{module.name} makes its names as it runs")
    inside = pkgutil.iter_modules(module.spec.submodule_search_locations or [])
    raise NotThere(module.name, name, [*names, *(found.name for found in inside)])


@cache
def _parsed(file: str) -> Source:
    return Source(ast.parse(Path(file).read_text(encoding="utf-8"), filename=file))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: the bodies of if, try and with too."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(statement, block, []))


def _bound_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [] if is_overload(statement) else [statement.name]
        case ast.Import(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names if alias.name != "*"]
        case ast.Assign(targets=targets):
            return [name for target in targets for name in _assigned(target)]
        case ast.AnnAssign(target=target):
            return _assigned(target)
    return []


def _assigned(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return [name for inner in target.elts for name in _assigned(inner)]
    return [target.id] if isinstance(target, ast.Name) else []  # AdamW.__doc__ = ... binds no name


def is_overload(statement: ast.stmt) -> bool:
    """Whether it is a signature for type checkers only."""
    return isinstance(statement, ast.FunctionDef) and "overload" in map(last_word, statement.decorator_list)


def last_word(node: ast.expr) -> str:
    """The last name of ``a.b.c``, ``c(...)`` or ``c[...]``; empty for other expressions."""
    if isinstance(node, ast.Call | ast.Subscript):
        return last_word(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
