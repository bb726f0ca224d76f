"""Tells what a class or function may be called with, from its source: nothing of it is imported.

Follows re-exports (``from .adamw import AdamW``, ``from x import *``, ``Y = X``) by ast; then Python judges a stub: the
same class or function with nothing in it. What only running the code would tell (C functions, ``__getattr__``, names
bound twice, decorators and metaclasses that may change the signature) is `Unread`.
"""

from __future__ import annotations
import __future__

import ast
import copy
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Signature
from pathlib import Path
from typing import Any

_SAME_SIGNATURE = {"staticmethod", "override", "final", "cache", "lru_cache"}
_SAME_SIGNATURE |= {"no_grad", "inference_mode", "record", "runtime_checkable"}
"""Decorators (last word of their name) that leave the signature as written."""
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)
_PLAIN_BASES = {"object", "ABC", "Generic", "Protocol"}


class Unread(Exception):
    """The source does not say; the reason is the message."""


class NotThere(Exception):
    """The source says that there is no such module or name; ``names`` are those that are there."""

    def __init__(self, owner: str, name: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"{owner} has no {name}" if owner else f"there is no module {name}")
        self.owner, self.name = owner, name
        self.names = tuple(names)


def signature_of(target: str, allowed: Sequence[str]) -> Signature:
    """The signature to call ``target`` (a class: without ``self``); annotations are text.

    Args:
        target: dotted name of a class or function.
        allowed: packages that modules on the way may belong to; following ``torch.os.system`` ends at ``os``.

    Raises:
        NotThere: no such module, or it has no such name.
        Unread: ast can't tell.
        PermissionError: the name leads through a module outside ``allowed``.
        SyntaxError: a file on the way is not Python.
    """
    first, *rest = target.split(".")
    try:
        return inspect.signature(_stub(_find(_module_named(first), rest, allowed), {}))
    except (TypeError, ValueError) as error:  # the bases don't go together
        raise Unread(str(error)) from error
    except RecursionError as error:
        raise Unread(f"{target} is made of itself") from error


class _SourceFile:
    """What a file of Python binds when it is run."""

    def __init__(self, text: str, file: str) -> None:
        self.tree = ast.parse(text, filename=file)
        self.bound: dict[str, list[tuple[ast.stmt, ast.alias | None]]] = {}
        """Name -> the statements that bind it, of an import with the part that does; ``*`` -> imports of all."""
        for statement in _statements(self.tree.body):
            for name, alias in _bindings(statement):
                self.bound.setdefault(name, []).append((statement, alias))

    def computes_names(self) -> bool:
        """Whether names may appear in it that no statement shows."""
        calls = (node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return "__getattr__" in self.bound or any(
            isinstance(func, ast.Name) and func.id in ("globals", "exec", "setattr") for func in calls
        )


@cache
def _source_of(file: str) -> _SourceFile:
    return _SourceFile(Path(file).read_text(encoding="utf-8"), file)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: the bodies of if, try and with too."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(statement, block, []))


def _bindings(statement: ast.stmt) -> Iterator[tuple[str, ast.alias | None]]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            if not _is_overload(statement):
                yield statement.name, None
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name.partition(".")[0], alias) for alias in names)
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):  # not AdamW of AdamW.__doc__ = ...
                    yield node.id, None


@dataclass(frozen=True)
class _Module:
    """A module that is not imported."""

    name: str
    spec: ModuleSpec

    def source(self) -> _SourceFile:
        if self.spec.origin is None:  # a namespace package: a folder without __init__.py
            return _SourceFile("", self.name)
        if not self.spec.origin.endswith(".py"):
            raise Unread(f"{self.name} is not written in Python")
        return _source_of(self.spec.origin)

    def submodule(self, name: str) -> _Module | None:
        if self.spec.submodule_search_locations is None:
            return None
        # By its own name alone: a folder without __init__.py would look its parent up among the imported modules.
        found = PathFinder.find_spec(name, list(self.spec.submodule_search_locations))
        if found is None:
            return None
        if found.submodule_search_locations is not None:
            found.submodule_search_locations = list(found.submodule_search_locations)
        return _Module(f"{self.name}.{name}", found)

    def named_in(self, statement: ast.ImportFrom) -> _Module:
        """The module that a ``from ... import`` in this one names."""
        package = self.name.split(".")
        above = statement.level - (self.spec.submodule_search_locations is not None)
        base = package[: len(package) - above] if statement.level else []
        return _module_named(".".join([*base, *([statement.module] if statement.module else [])]))


@dataclass(frozen=True)
class _Definition:
    """A class or function, and the module that it is written in."""

    module: _Module
    node: ast.ClassDef | ast.FunctionDef


def _module_named(dotted: str) -> _Module:
    first, *rest = dotted.split(".")
    spec = importlib.util.find_spec(first)
    found = _Module(first, spec) if spec else None
    for part in rest:
        found = found.submodule(part) if found else None
    if found is None:
        raise NotThere("", dotted)
    return found


def _find(start: _Module, parts: Sequence[str], allowed: Sequence[str] | None) -> _Definition:
    """The class or function ``parts[-1]`` that the other parts lead to; ``allowed`` None = through any module."""

    def checked(dotted: str) -> str:
        if allowed is not None and not any(f"{dotted}.".startswith(f"{package}.") for package in allowed):
            raise PermissionError(dotted)
        return dotted

    def member(module: _Module, name: str) -> _Module | _Definition:
        """What ``module.name`` is in the end."""
        source = module.source()
        match source.bound.get(name):
            case None:
                return module.submodule(name) or of_stars(module, source, name)
            case [(ast.FunctionDef() | ast.ClassDef() as node, _)]:
                return _Definition(module, node)
            case [(ast.Import(), ast.alias() as alias)]:
                return _module_named(checked(alias.name if alias.asname else name))
            case [(ast.ImportFrom() as statement, ast.alias() as alias)]:
                named = module.named_in(statement)
                return named.submodule(alias.name) or member(named, alias.name)
            case [(ast.Assign(value=ast.Name(id=other)), _)]:
                return member(module, other)
        raise Unread(f"{module.name}.{name} is computed, or bound more than once")  # try: import x; version switches

    def of_stars(module: _Module, source: _SourceFile, name: str) -> _Module | _Definition:
        names = [*source.bound]
        for statement, _ in source.bound.get("*", []):
            assert isinstance(statement, ast.ImportFrom)
            try:
                return member(module.named_in(statement), name)
            except NotThere as missing:
                names += missing.names
        if source.computes_names():
            raise Unread(f"{module.name} makes its names as it runs")
        inside = pkgutil.iter_modules(module.spec.submodule_search_locations or [])
        raise NotThere(module.name, name, [*names, *(found.name for found in inside)])

    found: _Module | _Definition = start
    for number, part in enumerate(parts, start=1):
        if isinstance(found, _Definition):
            raise Unread(f"{found.node.name} is not a module")
        # All but the last part must be modules: a module comes before what the package binds to the same name.
        inner = found.submodule(part) if number < len(parts) else None
        found = inner or member(found, part)
        if isinstance(found, _Module):
            checked(found.name)
    if isinstance(found, _Module):
        defined = [statement for statement in found.source().tree.body if isinstance(statement, _DEFINITIONS)]
        names = [statement.name for statement in defined if not statement.name.startswith("_")]
        raise NotThere(found.name, "class or function named after it: it is a module", names)
    return found


def _stub(definition: _Definition, made: dict[ast.stmt, Any]) -> Any:
    """The same class or function with nothing in it; ``made`` holds those that there are."""
    node = definition.node
    if node not in made:
        if isinstance(node, ast.FunctionDef):
            made[node] = _run(node.name, _function(node))
        else:
            made[node] = _class(definition, node, made)
    return made[node]


def _class(definition: _Definition, node: ast.ClassDef, made: dict[ast.stmt, Any]) -> Any:
    if any(word.arg == "metaclass" and last_word(word.value) != "ABCMeta" for word in node.keywords):
        raise Unread(f"{node.name} is made by a metaclass")
    as_dataclass = [one for one in node.decorator_list if last_word(one) == "dataclass"]
    _require_plain([one for one in node.decorator_list if one not in as_dataclass], node.name)
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and not _is_overload(item)}
    if "__new__" in own:
        raise Unread(f"{node.name} has __new__")
    body = [_function(own["__init__"])] if "__init__" in own else []
    if body and not as_dataclass:  # whatever it inherits
        return _run(node.name, f"class {node.name}:\n {body[0]}")
    # A base may come from anywhere: it is not named by the configuration.
    bases = [base for base in node.bases if last_word(base) not in _PLAIN_BASES]
    if not as_dataclass and len(bases) > 1:  # whose __init__ it is would take all that they inherit from
        raise Unread(f"{node.name} inherits from several classes")
    names = {}
    for number, base in enumerate(bases):
        parts = ast.unparse(base).split(".")
        if not all(part.isidentifier() for part in parts):
            raise Unread(f"the base class {ast.unparse(base)} is computed")
        names[f"base_{number}"] = _stub(_find(definition.module, parts, None), made)
    head = f"class {node.name}({', '.join(names)}):"
    if as_dataclass:
        words = as_dataclass[0].keywords if isinstance(as_dataclass[0], ast.Call) else []
        options = {word.arg: _literal(word.value) for word in words}
        if options.get("init") == "False" and not body:
            raise Unread(f"{node.name} is a dataclass without __init__")
        body += _fields(node)
        head = f"@dataclass(kw_only={options.get('kw_only') == 'True'})\n{head}"
    return _run(node.name, "\n ".join([head, *(body or ["..."])]), **names)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a dataclass, a line each."""
    for item in node.body:
        kind = last_word(item.annotation) if isinstance(item, ast.AnnAssign) else ""
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)) or kind == "ClassVar":
            continue
        annotation, default = item.annotation, item.value
        if kind == "InitVar" and isinstance(annotation, ast.Subscript):
            annotation = annotation.slice
        line = f"{item.target.id}: {kind if kind == 'KW_ONLY' else ast.unparse(annotation)}"
        if isinstance(default, ast.Call) and last_word(default) == "field":
            words = [word for word in default.keywords if word.arg in ("init", "kw_only", "default", "default_factory")]
            texts = (f"{(word.arg or '').removesuffix('_factory')}={_literal(word.value)}" for word in words)
            line += f" = field({', '.join(texts)})"
        elif default is not None:
            line += f" = {_literal(default)}"
        yield line


def _function(node: ast.FunctionDef) -> str:
    """A function with the same parameters that does nothing."""
    _require_plain(node.decorator_list, node.name)
    args = copy.copy(node.args)
    args.defaults = [ast.Name(_literal(default)) for default in args.defaults]
    args.kw_defaults = [default and ast.Name(_literal(default)) for default in args.kw_defaults]
    return f"def {node.name}({ast.unparse(args)}): ..."


def _literal(node: ast.expr) -> str:
    """A literal as it is written; any other expression as ``...``."""
    return ast.unparse(node) if isinstance(node, ast.Constant) else "..."


def _require_plain(decorators: Iterable[ast.expr], name: str) -> None:
    for decorator in decorators:
        if last_word(decorator) not in _SAME_SIGNATURE:
            raise Unread(f"{name} is decorated by {ast.unparse(decorator)}")


def _run(name: str, stub: str, **bases: Any) -> Any:
    """What the stub defines. Nothing of the user's is run: annotations stay text, defaults are literals."""
    space = {"__name__": __name__, "dataclass": dataclass, "field": field, "KW_ONLY": KW_ONLY, **bases}
    exec(compile(stub, "<signature>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), space)
    return space[name]


def _is_overload(statement: ast.stmt) -> bool:
    """Whether it is a signature for type checkers only."""
    return isinstance(statement, ast.FunctionDef) and "overload" in map(last_word, statement.decorator_list)


def last_word(node: ast.expr) -> str:
    """The last name of ``a.b.c``, ``c(...)`` or ``c[...]``; empty for other expressions."""
    if isinstance(node, ast.Call | ast.Subscript):
        return last_word(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
