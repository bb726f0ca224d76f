"""Holds each `_target_` and its arguments against the code: allowlist, signature, plain types.

Stage 1 (`check_static`) reads source files and imports nothing; stage 2 (`check_imported`) imports what stage 1 could
not read. Ranges are the target's own: its constructor raises ValueError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

from wellfed.config.build import PARTIAL, POSITIONAL, TARGET, import_fault, locate
from wellfed.config.faults.annotation import misfit
from wellfed.config.faults.source import NotThere, Unread
from wellfed.config.faults.static_signature import signature_of
from wellfed.config.knobs import nearest
from wellfed.config.schema import RunConfig
from wellfed.errors import Fault

_HANDED_OVER = {"workload.model": "any", "workload.optimizer": "first"}
"""Which required arguments come at run time: the model's from the data (`Datasets.model_args`), the optimizer's
parameters."""

Read = Callable[[str, Sequence[str]], Signature | None]
"""(target, allowed packages) -> how it may be called; None leaves the target to the other stage."""


def check_static(config: RunConfig) -> list[Fault]:
    """Faults of all targets that the source files show; imports nothing, a few ms a target."""
    faults: list[Fault] = []
    for name in ("model", "data", "optimizer"):
        where, node = f"workload.{name}", getattr(config.workload, name)
        if (not isinstance(node, Mapping) or TARGET not in node) and (node is not None or name != "optimizer"):
            way_out = f"Set {where}.{TARGET}=<package>.<module>.<name>."
            faults.append(Fault(where, f"names nothing to build: it has no {TARGET}.", way_out))
        for inner_where, inner in _targets(where, node):
            faults += _judge(inner_where, inner, config.config.allow_targets, _signature_in_source)
    return faults


def check_imported(config: RunConfig) -> list[Fault]:
    """Faults of the targets that stage 1 could not read; imports those (torch included)."""
    allowed = config.config.allow_targets
    faults: list[Fault] = []
    for name in ("model", "data", "optimizer"):
        for where, node in _targets(f"workload.{name}", getattr(config.workload, name)):
            if not list(_judge(where, node, allowed, _signature_in_source)):  # those were told
                faults += _judge(where, node, allowed, _signature_of_imported)
    return faults


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


def _targets(where: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every node with a `_target_` and its dotted name, outer ones first."""
    if isinstance(node, Mapping):
        if TARGET in node:
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
    if not any(f"{target}.".startswith(f"{package}.") for package in allowed):
        yield _not_allowed(typed, target.partition(".")[0], allowed)
        return
    try:
        signature = read(target, allowed)
    except NotThere as missing:
        near = nearest(missing.name, missing.names)
        meant = ".".join(near if part == missing.name and near else part for part in target.split("."))
        way_out = (
            f"Did you mean {where}.{TARGET}={meant}?" if near else "Name a class or function of a module on the path."
        )
        yield Fault(typed, f"{missing}.", way_out)
    except PermissionError as error:
        yield _not_allowed(typed, str(error), allowed)
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        yield Fault(typed, f"{getattr(error, 'filename', '')}{line} is not Python: {error}.", "Mend the file.")
    except ImportError as error:
        yield import_fault(where, target, error)
    else:
        yield from bind(where, node, signature) if signature is not None else ()


def _not_allowed(typed: str, package: str, allowed: Sequence[str]) -> Fault:
    return Fault(
        typed,
        f"{package} is not among the packages that a configuration may name ({', '.join(allowed)}).",
        f"If you trust it: config.allow_targets=[{','.join([*allowed, package])}]",
    )


def bind(where: str, node: Mapping[str, Any], signature: Signature) -> list[Fault]:
    """Unknown, missing and mistyped arguments of one node; ``signature`` as `signature_of` or inspect give it."""
    target = node[TARGET]
    given = {key: value for key, value in node.items() if key not in (TARGET, POSITIONAL, PARTIAL)}
    handed_over = "any" if node.get(PARTIAL) else _HANDED_OVER.get(where, "none")
    parameters = dict(signature.parameters)
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(node.get(POSITIONAL, ())) + (handed_over == "first")
    taken = {parameter.name for parameter in positional[:count]}
    accepted = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    faults = []
    if count > len(positional) and not any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values()):
        faults.append(
            Fault(f"{where}.{POSITIONAL}", f"{target} takes {len(positional)}, not {count}.", "Leave some out.")
        )
    for name, value in given.items():
        typed = f"{where}.{name}={value}"
        if name in taken and name in accepted:
            faults.append(Fault(typed, f"{target} is handed {name} already.", f"Take it away: ~{where}.{name}"))
        elif name in accepted:
            wrong = misfit(value, parameters[name])
            if wrong:
                faults.append(Fault(typed, wrong, f"Change {where}.{name}."))
        elif not takes_any:
            near = nearest(name, accepted)
            way_out = f"Did you mean {where}.{near}={value}?" if near else f"It takes: {', '.join(accepted)}."
            faults.append(Fault(typed, f"{target} has no argument {name}.", way_out))
    for parameter in parameters.values():
        by_name = parameter.kind is not Parameter.POSITIONAL_ONLY and parameter.name in given
        if handed_over != "any" and _is_needed(parameter) and not by_name and parameter.name not in taken:
            way_out = f"Add +{where}.{parameter.name}=<value>"
            faults.append(Fault(where, f"{target} needs the argument {parameter.name}.", way_out))
    return faults


def _is_needed(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind not in (
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    )
