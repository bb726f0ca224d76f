"""Finds the class or function behind a dotted name in source files, by ast: nothing is imported.

Follows re-exports (``from .adamw import AdamW``, ``from x import *``, ``Y = X``). What only running the code would
tell (C functions, ``__getattr__``, names bound twice) is `Unread`.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


class Unread(Exception):
    """The source does not say; the reason is the message."""


class NotThere(Exception):
    """The source says that there is no such module or name."""

    def __init__(self, owner: str, name: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"{owner} has no {name}" if owner else f"there is no module {name}")
        self.owner = owner
        self.name = name
        self.names = tuple(names)


@dataclass(frozen=True)
class Module:
    """A module's source."""

    name: str
    spec: ModuleSpec
    tree: ast.Module

    @property
    def package(self) -> str:
        """What its relative imports start from."""
        return self.name if self.spec.submodule_search_locations is not None else self.name.rpartition(".")[0]


MAX_HOPS = 25
"""Longest chain of re-exports or base classes that is followed."""


def enter(parts: Sequence[str], allowed: Sequence[str]) -> tuple[Module, str | None]:
    """The module that holds the last part, and that part (None: the whole name is a module).

    Submodules come first, as all but the last part must be modules.

    Raises:
        NotThere: no such module or name.
        Unread: ast can't tell.
        PermissionError: the name leads through a module outside ``allowed``.
    """
    spec = importlib.util.find_spec(parts[0])
    if spec is None:
        raise NotThere("", parts[0])
    name, rest = parts[0], list(parts[1:])
    while rest:
        inner = _submodule(spec, rest[0])
        if inner is None or (len(rest) == 1 and _binds(_read(name, spec), rest[0])):
            break
        name, spec = f"{name}.{rest.pop(0)}", inner
    if not rest:
        return _read(name, spec), None
    module = _read(name, spec)
    if len(rest) == 1:
        return module, rest[0]
    # Not a submodule, yet more parts follow: a module under another name (torch.os), or a class and its method.
    bound = binding(module, rest[0])
    if isinstance(bound, ast.Import | ast.ImportFrom):
        imported = imported_module(module, bound, rest[0])
        if imported is not None:
            _require_allowed(imported, allowed)
            return enter([*imported.split("."), *rest[1:]], allowed)
    if bound is None and not _is_dynamic(module):
        raise NotThere(name, rest[0], [*_names(module), *_submodules(spec)])
    raise Unread(f"{'.'.join(parts)}: {rest[0]} is not a module")


def _require_allowed(module: str, allowed: Sequence[str]) -> None:
    if not any(module == package or module.startswith(f"{package}.") for package in allowed):
        raise PermissionError(module)


def _submodule(spec: ModuleSpec, name: str) -> ModuleSpec | None:
    if spec.submodule_search_locations is None:
        return None
    # By its own name alone: a folder without __init__.py would look its parent up among the imported modules.
    found = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if found is not None and found.submodule_search_locations is not None:
        found.submodule_search_locations = list(found.submodule_search_locations)
    return found


def _submodules(spec: ModuleSpec) -> list[str]:
    return [found.name for found in pkgutil.iter_modules(spec.submodule_search_locations or [])]


def _find(name: str) -> ModuleSpec:
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    for part in rest:
        spec = _submodule(spec, part) if spec else None
    if spec is None:
        raise NotThere("", name)
    return spec


def _read(name: str, spec: ModuleSpec) -> Module:
    if spec.origin is None:  # a namespace package: a folder without __init__.py
        return Module(name, spec, ast.Module(body=[], type_ignores=[]))
    if not spec.origin.endswith(".py"):
        raise Unread(f"{name} is not written in Python")
    return Module(name, spec, _parse(spec.origin))


@cache
def _parse(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"), filename=file)


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements that run on import: the bodies of if, try and with too."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names if alias.name != "*"]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [name for target in targets for name in _assigned(target)]


def _assigned(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return [name for inner in target.elts for name in _assigned(inner)]
    return [target.id] if isinstance(target, ast.Name) else []  # AdamW.__doc__ = ... binds no name


def _names(module: Module) -> list[str]:
    return [name for statement in _statements(module.tree.body) for name in _bound_names(statement)]


def is_overload(statement: ast.stmt) -> bool:
    """Whether it is a signature for type checkers only."""
    return isinstance(statement, ast.FunctionDef) and "overload" in map(last_word, statement.decorator_list)


def binding(module: Module, name: str) -> ast.stmt | None:
    """The statement that binds ``name``; Unread where several do (``try: import x``, version switches)."""
    found = [s for s in _statements(module.tree.body) if name in _bound_names(s) and not is_overload(s)]
    if len(found) > 1:
        raise Unread(f"{module.name}.{name} is bound {len(found)} times")
    return found[0] if found else None


def _binds(module: Module, name: str) -> bool:
    return any(name in _bound_names(statement) for statement in _statements(module.tree.body))


def _is_dynamic(module: Module) -> bool:
    """Whether names may appear in it that no statement shows."""
    if _binds(module, "__getattr__"):
        return True
    calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return any(isinstance(func, ast.Name) and func.id in ("globals", "exec", "setattr") for func in calls)


def imported_module(module: Module, statement: ast.Import | ast.ImportFrom, name: str) -> str | None:
    """The module that ``name`` stands for after an import; None where it is a name inside a module."""
    if isinstance(statement, ast.Import):
        alias = next(a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name)
        return alias.name if alias.asname else name
    source, original = _source_of(module, statement, name)
    try:
        return f"{source}.{original}" if _submodule(_find(source), original) else None
    except NotThere:
        return None


def _source_of(module: Module, statement: ast.ImportFrom, name: str) -> tuple[str, str]:
    """(module, original name) of ``from module import original as name``."""
    base = module.package.split(".") if statement.level else []
    if statement.level > 1:
        base = base[: len(base) - statement.level + 1]
    source = ".".join([*base, *([statement.module] if statement.module else [])])
    original = next((a.name for a in statement.names if (a.asname or a.name) == name), name)
    return source, original


def definition(module: Module, name: str, allowed: Sequence[str], hops: int) -> tuple[Module, ast.stmt]:
    """The class or function that ``name`` is in the end, with the module that it is written in.

    Raises as `enter` does.
    """
    if hops > MAX_HOPS:
        raise Unread(f"{module.name}.{name} is passed on too often")
    statement = binding(module, name)
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return module, statement
    if isinstance(statement, ast.ImportFrom):
        if imported_module(module, statement, name):
            raise Unread(f"{module.name}.{name} is a module")
        source, original = _source_of(module, statement, name)
        return definition(_read(source, _find(source)), original, allowed, hops + 1)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
        return definition(module, statement.value.id, allowed, hops + 1)
    if isinstance(statement, ast.Import):
        imported = imported_module(module, statement, name)
        _require_allowed(imported or name, allowed)
    if statement is not None:
        raise Unread(f"{module.name}.{name} is computed")
    return _from_star(module, name, allowed, hops)


def _from_star(module: Module, name: str, allowed: Sequence[str], hops: int) -> tuple[Module, ast.stmt]:
    names = _names(module)
    for statement in _statements(module.tree.body):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            source, _ = _source_of(module, statement, name)
            try:
                return definition(_read(source, _find(source)), name, allowed, hops + 1)
            except NotThere as missing:
                names += missing.names
    if _is_dynamic(module):
        raise Unread(f"{module.name} makes its names as it runs")
    raise NotThere(module.name, name, [*names, *_submodules(module.spec)])


def last_word(node: ast.expr) -> str:
    """The last name of ``a.b.c``, ``c(...)`` or ``c[...]``; empty for other expressions."""
    if isinstance(node, ast.Call | ast.Subscript):
        return last_word(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
