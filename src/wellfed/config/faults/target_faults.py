"""Holds each `_target_` and its arguments against the code: allowlist, signature, plain types.

Stage 1 (`check_static`) reads source files and imports nothing; stage 2 (`check_imported`) imports what stage 1 could
not read. Ranges are the target's own: its constructor raises ValueError.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

from wellfed import project
from wellfed.config.build import PARTIAL, POSITIONAL, TARGET, import_fault, locate
from wellfed.config.faults.static_signature import NotThere, Unread, last_word, signature_of
from wellfed.config.knobs import nearest
from wellfed.config.schema import RunConfig
from wellfed.errors import Fault
from wellfed.extras import PACKAGES, absence, is_installed

_HANDED_OVER = {"workload.model": "any", "workload.optimizer": "first"}
"""Which required arguments come at run time: the model's from the data (`Datasets.model_args`), the optimizer's
parameters; those of schedulers, their optimizer, too."""
_SCHEDULER = re.compile(r"workload\.schedule(\.schedulers\[\d+\])*")

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None), "NoneType": type(None)}
_SIMPLE |= dict.fromkeys(("list", "List", "tuple", "Tuple", "Sequence"), list)
_SIMPLE |= dict.fromkeys(("dict", "Dict", "Mapping"), dict)
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

_LISTED = 8
"""Most names that a message lists."""
_ARGUMENTS = {"learning_rate": ("lr",), "lr": ("learning_rate",), "wd": ("weight_decay",), "p": ("dropout",)}
"""Argument that there is none of -> what libraries call it instead."""

Read = Callable[[str, Sequence[str]], Signature | None]
"""(target, allowed packages) -> how it may be called; None leaves the target to the other stage."""
Kind = type | tuple[Any, ...]
"""One alternative that an annotation allows: a type, or the values of a Literal."""


def check_static(config: RunConfig) -> list[Fault]:
    """Faults of all targets that the source files show; imports nothing, a few ms a target."""
    faults: list[Fault] = []
    for where, node in _configured(config):
        names_something = any(True for _ in _targets(where, node)) if where == "workload.metrics" else is_target(node)
        if not names_something:
            way_out = f"Set {where}.{TARGET}=<package>.<module>.<name>."
            faults.append(Fault(where, f"names nothing to build: it has no {TARGET}.", way_out))
        for inner_where, inner in _targets(where, node):
            faults += _judge(inner_where, inner, config.config.allow_targets, _signature_in_source)
    return faults


def check_imported(config: RunConfig) -> list[Fault]:
    """Faults of the targets that stage 1 could not read; imports those (torch included)."""
    allowed = config.config.allow_targets
    faults: list[Fault] = []
    for outer, configured in _configured(config):
        for where, node in _targets(outer, configured):
            if not list(_judge(where, node, allowed, _signature_in_source)):  # those were told
                faults += _judge(where, node, allowed, _signature_of_imported)
    return faults


def _configured(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each place that must name something to build."""
    workload = config.workload
    yield "workload.model", workload.model
    for name in ("data", "optimizer", "metrics"):
        if (node := getattr(workload, name)) is not None:
            yield f"workload.{name}", node
    if workload.schedule.target is not None:
        yield "workload.schedule", workload.schedule.target
    for name, node in (config.callbacks if isinstance(config.callbacks, Mapping) else {}).items():
        if node is not None:
            yield f"callbacks.{name}", node


def _signature_in_source(target: str, allowed: Sequence[str]) -> Signature | None:
    try:
        return signature_of(target, allowed)
    except Unread:
        return None


def _signature_of_imported(target: str, allowed: Sequence[str]) -> Signature | None:
    if _signature_in_source(target, allowed) is not None:
        return None
    try:
        return inspect.signature(locate(target))
    except (ValueError, TypeError):  # a C function: its call will tell
        return None


def is_target(node: Any) -> bool:
    """Whether a node says itself what is to be built."""
    return isinstance(node, Mapping) and TARGET in node


def _targets(where: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every node with a `_target_` and its dotted name, outer ones first."""
    if isinstance(node, Mapping):
        if is_target(node):
            yield where, node
        for key, value in node.items():
            yield from _targets(f"{where}.{key}", value)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _targets(f"{where}[{index}]", value)


def _judge(where: str, node: Mapping[str, Any], allowed: Sequence[str], read: Read) -> Iterator[Fault]:
    target = node[TARGET]
    typed = f"{where}.{TARGET}={target}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        yield Fault(typed, "is not a dotted name.", f"Set {where}.{TARGET}=<package>.<module>.<name>.")
        return
    may_name = [*allowed, *own_packages()]
    try:
        if not any(f"{target}.".startswith(f"{package}.") for package in may_name):
            raise PermissionError(target.partition(".")[0])
        signature = read(target, may_name)
    except NotThere as missing:
        meant = _meant(target, missing.name, missing.names, may_name)
        elsewhere = "Name a class or function of a module on the path."
        if missing.owner == target and missing.names:
            elsewhere = f"Name one of those in it: {', '.join(missing.names[:_LISTED])}."
        yield Fault(typed, f"{missing}.", f"Did you mean {where}.{TARGET}={meant}?" if meant else elsewhere)
    except PermissionError as refused:
        package = str(refused)
        listed = ", ".join(allowed)
        if not is_installed(first := package.partition(".")[0]):
            if first in PACKAGES:
                yield Fault(typed, *absence(first))
                return
            near = nearest(package, may_name)
            way_out = f"Did you mean the package {near}?" if near else f"Name one of {listed}, or yours in src/."
            yield Fault(typed, f"there is no package {package}.", way_out)
            return
        problem = f"{package} is not among the packages that a configuration may name ({listed}, and those in src/)."
        yield Fault(typed, problem, f"If you trust it: config.allow_targets=[{','.join([*allowed, package])}]")
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        yield Fault(typed, f"{getattr(error, 'filename', '')}{line} is not Python: {error}.", "Mend the file.")
    except ImportError as error:
        yield import_fault(where, target, error)
    else:
        yield from bind(where, node, signature) if signature is not None else ()


def own_packages() -> list[str]:
    """Returns the packages and modules of the project's ``src/``."""
    found = project.sources().glob("[!._]*")
    return sorted({path.stem for path in found if path.is_dir() or path.suffix == ".py"})


def _meant(target: str, wrong: str, names: Sequence[str], allowed: Sequence[str]) -> str:
    """Returns the class or function nearest to ``target`` once ``wrong`` is another of ``names``; empty if none."""
    left, is_class = list(names), wrong[:1].isupper()
    while near := nearest(wrong, left):
        left.remove(near)
        meant = ".".join(near if part == wrong else part for part in target.split("."))
        if is_class and not near[:1].isupper():
            continue
        try:
            signature_of(meant, allowed)
        except Unread:
            return meant
        except (NotThere, PermissionError, SyntaxError, UnicodeDecodeError, ImportError):
            continue
        return meant
    return ""


def bind(where: str, node: Mapping[str, Any], signature: Signature) -> list[Fault]:
    """Unknown, missing and mistyped arguments of one node; ``signature`` as `signature_of` or inspect give it."""
    target = node[TARGET]
    given = {key: value for key, value in node.items() if key not in (TARGET, POSITIONAL, PARTIAL)}
    is_scheduler = _SCHEDULER.fullmatch(where) is not None
    handed_over = "any" if node.get(PARTIAL) else _HANDED_OVER.get(where, "none")
    parameters = signature.parameters

    def of_kind(*kinds: Any) -> list[Parameter]:
        return [parameter for parameter in parameters.values() if parameter.kind in kinds]

    positional = of_kind(Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    accepted = [each.name for each in of_kind(Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    count = len(node.get(POSITIONAL, ())) + (handed_over == "first")
    taken = {parameter.name for parameter in positional[:count]} | ({"optimizer"} if is_scheduler else set())
    faults = []
    if count > len(positional) and not of_kind(Parameter.VAR_POSITIONAL):
        problem = f"{target} takes {len(positional)}, not {count}."
        faults.append(Fault(f"{where}.{POSITIONAL}", problem, "Leave some out."))
    for name, value in given.items():
        typed = f"{where}.{name}={value}"
        if name in taken and name in accepted:
            faults.append(Fault(typed, f"{target} is handed {name} already.", f"Take it away: ~{where}.{name}"))
        elif name in accepted:
            if wrong := misfit(value, parameters[name]):
                faults.append(Fault(typed, wrong, f"Change {where}.{name}."))
        elif not of_kind(Parameter.VAR_KEYWORD):
            near = next((one for one in _ARGUMENTS.get(name, ()) if one in accepted), None) or nearest(name, accepted)
            way_out = f"Did you mean {where}.{near}={value}?" if near else f"It takes: {', '.join(accepted)}."
            faults.append(Fault(typed, f"{target} has no argument {name}.", way_out))
    for parameter in [*positional, *of_kind(Parameter.KEYWORD_ONLY)] if handed_over != "any" else ():
        has_value = parameter.name in taken or (parameter.name in given and parameter.name in accepted)
        if parameter.default is Parameter.empty and not has_value:
            way_out = f"Add +{where}.{parameter.name}=<value>"
            faults.append(Fault(where, f"{target} needs the argument {parameter.name}.", way_out))
    return faults


def misfit(value: Any, parameter: Parameter) -> str:
    """What is wrong with ``value`` for ``parameter`` (annotated by text or a type); empty if it may fit."""
    annotation = parameter.annotation
    if annotation is Parameter.empty or isinstance(value, Mapping) or (value is None and parameter.default is None):
        return ""
    kinds = _kinds_of_text(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    if kinds is None or any(_fits(value, kind) for kind in kinds):
        return ""
    words = ("one of " + ", ".join(map(str, kind)) if isinstance(kind, tuple) else _WORDS[kind] for kind in kinds)
    return f"must be {' or '.join(dict.fromkeys(words))}."


def _fits(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return any(value == option and type(value) is type(option) for option in kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else (list, tuple) if kind is list else kind)


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
            parts = [left, right]
        case ast.Subscript(slice=inner) if name in ("Optional", "Union", "Literal"):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name == "Literal":
                return [tuple(part.value for part in parts if isinstance(part, ast.Constant))]
            parts = [*parts, ast.Constant(None)] if name == "Optional" else parts
        case _:
            return [_SIMPLE[name]] if name in _SIMPLE else None
    alternatives: list[Kind] = []
    for part in parts:
        if last_word(part) not in _NEVER_IN_YAML:
            kinds = _kinds(part)
            if kinds is None:
                return None
            alternatives += kinds
    return alternatives or None
