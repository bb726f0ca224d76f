"""Signatures read from source files: what a class or function may be called with, without importing it.

Inherited ``__init__`` and dataclass fields are followed; decorators and metaclasses that may change the signature
make it `Unread`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from inspect import Parameter, Signature
from typing import Any

from wellfed.config.faults.source import (
    MAX_HOPS,
    Module,
    NotThere,
    Unread,
    binding,
    definition,
    enter,
    imported_module,
    is_overload,
    last_word,
)

_SAME_SIGNATURE = frozenset(
    {
        "staticmethod",
        "override",
        "final",
        "cache",
        "lru_cache",
        "no_grad",
        "inference_mode",
        "record",
        "runtime_checkable",
    }
)
"""Decorators (last word of their name) that leave the signature as written."""
_PLAIN_BASES = frozenset({"object", "ABC", "Generic", "Protocol"})


def signature_of(target: str, allowed: Sequence[str]) -> Signature:
    """The signature to call ``target`` (a class: without ``self``); annotations are ast nodes, defaults source text.

    Args:
        target: dotted name of a class or function.
        allowed: packages that modules on the way may belong to; following ``torch.os.system`` ends at ``os``.

    Raises:
        NotThere: no such module, or it has no such name.
        Unread: ast can't tell.
        PermissionError: the name leads through a module outside ``allowed``.
        SyntaxError: a file on the way is not Python.
    """
    module, name = enter(target.split("."), allowed)
    if name is None:
        raise NotThere(target, "class or function named after it: it is a module")
    owner, node = definition(module, name, allowed, 0)
    return _signature(owner, node, allowed, 0)


def _signature(module: Module, node: ast.stmt, allowed: Sequence[str], hops: int) -> Signature:
    if isinstance(node, ast.FunctionDef):
        _require_plain(node.decorator_list, node.name)
        return Signature(_parameters(node.args))
    if not isinstance(node, ast.ClassDef):
        raise Unread("neither a class nor a function")
    if hops > MAX_HOPS or any(word.arg == "metaclass" and last_word(word.value) != "ABCMeta" for word in node.keywords):
        raise Unread(f"{node.name} is made by a metaclass")
    decorators = [decorator for decorator in node.decorator_list if last_word(decorator) != "dataclass"]
    _require_plain(decorators, node.name)
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and not is_overload(item)}
    if "__new__" in own:
        raise Unread(f"{node.name} has __new__")
    if "__init__" in own:
        _require_plain(own["__init__"].decorator_list, node.name)
        return Signature(_parameters(own["__init__"].args)[1:])
    if len(decorators) < len(node.decorator_list):
        return Signature(_order(_dataclass_fields(module, node, allowed, hops).values()))
    return _inherited(module, node, allowed, hops)


def _inherited(module: Module, node: ast.ClassDef, allowed: Sequence[str], hops: int) -> Signature:
    bases = [base for base in node.bases if last_word(base) not in _PLAIN_BASES]
    if not bases:
        return Signature()
    if len(bases) > 1:
        raise Unread(f"{node.name} inherits from several classes")
    return _signature(*_base(module, bases[0], allowed, hops), allowed, hops + 1)


def _base(module: Module, base: ast.expr, allowed: Sequence[str], hops: int) -> tuple[Module, ast.stmt]:
    if isinstance(base, ast.Name):
        return definition(module, base.id, allowed, hops + 1)
    if isinstance(base, ast.Attribute):
        first, *rest = ast.unparse(base).split(".")
        statement = binding(module, first)
        if isinstance(statement, ast.Import | ast.ImportFrom) and rest:
            imported = imported_module(module, statement, first)
            if imported is not None:
                # A base class may come from anywhere: it is not named by the configuration.
                inner, name = enter([*imported.split("."), *rest], [first, imported, *allowed])
                if name is not None:
                    return definition(inner, name, allowed, hops + 1)
    raise Unread(f"the base class {ast.unparse(base)} is computed")


def _require_plain(decorators: Iterable[ast.expr], name: str) -> None:
    for decorator in decorators:
        if last_word(decorator) not in _SAME_SIGNATURE:
            raise Unread(f"{name} is decorated by {ast.unparse(decorator)}")


def _parameters(args: ast.arguments) -> list[Parameter]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults]
    found = []
    for index, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = Parameter.POSITIONAL_ONLY if index < len(args.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        found.append(_parameter(arg, kind, default))
    if args.vararg:
        found.append(_parameter(args.vararg, Parameter.VAR_POSITIONAL, None))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(_parameter(arg, Parameter.KEYWORD_ONLY, default))
    if args.kwarg:
        found.append(_parameter(args.kwarg, Parameter.VAR_KEYWORD, None))
    return found


def _parameter(arg: ast.arg, kind: Any, default: ast.expr | None) -> Parameter:
    shown = Parameter.empty if default is None else ast.unparse(default)
    return Parameter(arg.arg, kind, default=shown, annotation=arg.annotation or Parameter.empty)


def _dataclass_fields(module: Module, node: ast.ClassDef, allowed: Sequence[str], hops: int) -> dict[str, Parameter]:
    """Name -> parameter, base classes first; a field defined again keeps its place."""
    found: dict[str, Parameter] = {}
    for base in reversed(node.bases):
        if last_word(base) in _PLAIN_BASES:
            continue
        owner, parent = _base(module, base, allowed, hops)
        if not isinstance(parent, ast.ClassDef) or hops > MAX_HOPS:
            raise Unread(f"the base class {ast.unparse(base)} is no class")
        if any(last_word(decorator) == "dataclass" for decorator in parent.decorator_list):
            found |= _dataclass_fields(owner, parent, allowed, hops + 1)
    options = _dataclass_options(node)
    if options.get("init") is False:
        raise Unread(f"{node.name} is a dataclass without __init__")
    keyword_only = options.get("kw_only") is True
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if last_word(item.annotation) == "KW_ONLY":
            keyword_only = True
        elif last_word(item.annotation) != "ClassVar":
            parameter = _field(item, item.target.id, keyword_only)
            if parameter is not None:
                found[item.target.id] = parameter
    return found


def _dataclass_options(node: ast.ClassDef) -> dict[str, Any]:
    for decorator in node.decorator_list:
        if last_word(decorator) == "dataclass" and isinstance(decorator, ast.Call):
            return {word.arg or "": getattr(word.value, "value", None) for word in decorator.keywords}
    return {}


def _field(item: ast.AnnAssign, name: str, keyword_only: bool) -> Parameter | None:
    default, annotation = item.value, item.annotation
    if isinstance(default, ast.Call) and last_word(default) == "field":
        words = {word.arg: word.value for word in default.keywords}
        if _is(words.get("init"), False):
            return None
        keyword_only = _is(words["kw_only"], True) if "kw_only" in words else keyword_only
        default = words.get("default") or words.get("default_factory")
    if isinstance(annotation, ast.Subscript) and last_word(annotation) == "InitVar":
        annotation = annotation.slice
    kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
    shown = Parameter.empty if default is None else ast.unparse(default)
    return Parameter(name, kind, default=shown, annotation=annotation)


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _order(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Positional before keyword-only, as ``dataclass`` puts them."""
    return sorted(parameters, key=lambda parameter: parameter.kind)
