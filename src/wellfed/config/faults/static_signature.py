"""Tells what a class or function may be called with, from its source: nothing of it is imported.

Python judges a stub: the same classes, fields and parameters with nothing in them. Decorators and metaclasses that may
change the signature make it `Unread`.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from inspect import Signature
from types import FunctionType
from typing import Any

from wellfed.config.faults.source import Definition, Unread, find, is_overload, last_word, module_named

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
    found = find(module_named(first), rest, allowed)
    try:
        return inspect.signature(_stub(found, {}))
    except (TypeError, ValueError) as error:  # the bases don't go together
        raise Unread(str(error)) from error


def _stub(definition: Definition, known: dict[ast.stmt, Any]) -> Any:
    """The same class or function with nothing in it; ``known`` are those made so far, None while one is made."""
    node = definition.node
    if node not in known:
        known[node] = None
        known[node] = _function(node) if isinstance(node, ast.FunctionDef) else _class(definition, node, known)
    if known[node] is None:
        raise Unread(f"{node.name} inherits from itself")
    return known[node]


def _class(definition: Definition, node: ast.ClassDef, known: dict[ast.stmt, Any]) -> type:
    if any(word.arg == "metaclass" and last_word(word.value) != "ABCMeta" for word in node.keywords):
        raise Unread(f"{node.name} is made by a metaclass")
    as_dataclass = [one for one in node.decorator_list if last_word(one) == "dataclass"]
    _require_plain([one for one in node.decorator_list if one not in as_dataclass], node.name)
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and not is_overload(item)}
    if "__new__" in own:
        raise Unread(f"{node.name} has __new__")
    methods = {"__init__": _function(own["__init__"])} if "__init__" in own else {}
    if methods and not as_dataclass:  # whatever it inherits
        return type(node.name, (), methods)
    bases = tuple(_stub(_base(definition, base), known) for base in node.bases if last_word(base) not in _PLAIN_BASES)
    if not as_dataclass:
        if len(bases) > 1:  # whose __init__ it is would take all that they inherit from
            raise Unread(f"{node.name} inherits from several classes")
        return type(node.name, bases, methods)
    options = _literals(as_dataclass[0].keywords) if isinstance(as_dataclass[0], ast.Call) else {}
    if options.get("init") is False and not methods:
        raise Unread(f"{node.name} is a dataclass without __init__")
    keyword_only = options.get("kw_only") is True
    return dataclasses.make_dataclass(node.name, _fields(node), bases=bases, namespace=methods, kw_only=keyword_only)


def _base(definition: Definition, base: ast.expr) -> Definition:
    """A base class may come from anywhere: it is not named by the configuration."""
    parts = ast.unparse(base).split(".")
    if not all(part.isidentifier() for part in parts):
        raise Unread(f"the base class {ast.unparse(base)} is computed")
    return find(definition.module, parts, None)


def _require_plain(decorators: Iterable[ast.expr], name: str) -> None:
    for decorator in decorators:
        if last_word(decorator) not in _SAME_SIGNATURE:
            raise Unread(f"{name} is decorated by {ast.unparse(decorator)}")


def _function(node: ast.FunctionDef) -> FunctionType:
    """A function with the same parameters that does nothing; defaults that are no literals are ``...``."""
    _require_plain(node.decorator_list, node.name)
    args = ast.arguments(**dict(ast.iter_fields(node.args)))
    args.defaults = [_constant(default) for default in args.defaults]
    args.kw_defaults = [default and _constant(default) for default in args.kw_defaults]
    made = ast.FunctionDef(name="made", args=args, body=[ast.Pass()], decorator_list=[])
    module = ast.fix_missing_locations(ast.Module(body=[made], type_ignores=[]))
    space: dict[str, Any] = {}
    # Nothing of the user's is run: annotations stay text, defaults are literals.
    exec(compile(module, "<signature>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), space)
    function: FunctionType = space["made"]
    return function


def _constant(default: ast.expr) -> ast.Constant:
    return default if isinstance(default, ast.Constant) else ast.Constant(...)


def _fields(node: ast.ClassDef) -> list[tuple[str, Any, Any]]:
    """The fields of a dataclass as `dataclasses.make_dataclass` takes them."""
    found: list[tuple[str, Any, Any]] = []
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        annotation = item.annotation
        kind = last_word(annotation)
        if kind == "InitVar" and isinstance(annotation, ast.Subscript):
            annotation = annotation.slice
        if kind == "KW_ONLY":
            found.append((item.target.id, dataclasses.KW_ONLY, dataclasses.field()))
        elif kind != "ClassVar":
            found.append((item.target.id, ast.unparse(annotation), _field(item.value)))
    return found


def _field(default: ast.expr | None) -> Any:
    options: dict[str, Any] = {}
    if isinstance(default, ast.Call) and last_word(default) == "field":
        given = _literals(default.keywords)
        options = {word: given[word] for word in ("init", "kw_only") if word in given}
        has_default = bool({"default", "default_factory"} & set(given))
        default = next((word.value for word in default.keywords if word.arg == "default"), None)
        if has_default and default is None:
            return dataclasses.field(default=..., **options)
    if default is not None:
        options["default"] = _constant(default).value
    return dataclasses.field(**options)


def _literals(keywords: Iterable[ast.keyword]) -> dict[str, Any]:
    return {word.arg or "": getattr(word.value, "value", None) for word in keywords}
