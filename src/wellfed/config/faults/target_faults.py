"""Checks each `_target_` and its arguments: allowed package, and signature.

`check_static` imports nothing. It refuses malformed names, and packages that are not allowed or not installed.
`check_imported` imports the targets and binds their arguments, after torch is imported and before data is read. Values
are checked by the target's constructor, which raises ValueError or TypeError.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

from wellfed import project
from wellfed.config.build import PARTIAL, POSITIONAL, TARGET, NotThere, import_fault, locate
from wellfed.config.faults.explain_refusal import nearest
from wellfed.config.schema import RunConfig
from wellfed.errors import Fault
from wellfed.extras import PACKAGES, absence, is_installed

_HANDED_OVER = {"workload.model": "any", "workload.optimizer": "first"}
"""Nodes whose required arguments are passed at run time: by `Datasets.model_args`, and the optimizer's parameters."""
_SCHEDULER = re.compile(r"workload\.schedule(\.schedulers\[\d+\])*")

_LISTED = 8
"""Maximum number of names in a message."""
_NO_SUCH = "Name a class or function of a module on the path."
_ARGUMENTS = {"learning_rate": ("lr",), "lr": ("learning_rate",), "wd": ("weight_decay",), "p": ("dropout",)}
"""Unknown argument -> names for it in other libraries."""


def check_static(config: RunConfig) -> list[Fault]:
    """Returns the faults of all targets that can be found without importing anything."""
    faults: list[Fault] = []
    for where, node in _configured(config):
        names_something = any(True for _ in _targets(where, node)) if where == "workload.metrics" else is_target(node)
        if not names_something:
            way_out = f"Set {where}.{TARGET}=<package>.<module>.<name>."
            faults.append(Fault(where, f"names nothing to build: it has no {TARGET}.", way_out))
        for inner_where, inner in _targets(where, node):
            faults += _name_faults(inner_where, inner[TARGET], config.config.allow_targets)
    return faults


def check_imported(config: RunConfig) -> list[Fault]:
    """Imports all targets (torch included) and returns the faults of their names and arguments.

    Targets refused by `check_static` are skipped.
    """
    allowed = config.config.allow_targets
    faults: list[Fault] = []
    for outer, configured in _configured(config):
        for where, node in _targets(outer, configured):
            if not _name_faults(where, node[TARGET], allowed):
                faults += _argument_faults(where, node, allowed)
    return faults


def _configured(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of each entry that must have a `_target_`."""
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


def is_target(node: Any) -> bool:
    """Returns whether a node has a `_target_`."""
    return isinstance(node, Mapping) and TARGET in node


def _targets(where: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every node with a `_target_` and its dotted name, outer ones first."""
    if isinstance(node, Mapping):
        if is_target(node):
            yield where, node
        for key, value in node.items():
            yield from _targets(f"{where}.{key}", value)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _targets(f"{where}[{index}]", value)


def _name_faults(where: str, target: Any, allowed: Sequence[str]) -> list[Fault]:
    typed = f"{where}.{TARGET}={target}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return [Fault(typed, "is not a dotted name.", f"Set {where}.{TARGET}=<package>.<module>.<name>.")]
    may_name, package = [*allowed, *own_packages()], target.partition(".")[0]
    if not is_installed(package):
        return [_not_installed(typed, package, allowed)]
    is_allowed = any(f"{target}.".startswith(f"{each}.") for each in may_name)
    return [] if is_allowed else [_refused(typed, package, allowed)]


def _refused(typed: str, package: str, allowed: Sequence[str]) -> Fault:
    listed = ", ".join(allowed)
    problem = f"{package} is not among the packages that a configuration may name ({listed}, and those in src/)."
    return Fault(typed, problem, f"If you trust it: config.allow_targets=[{','.join([*allowed, package])}]")


def _not_installed(typed: str, package: str, allowed: Sequence[str]) -> Fault:
    if package in PACKAGES:
        return Fault(typed, *absence(package))
    near = nearest(package, [each for each in (*allowed, *own_packages()) if each != package])
    listed = ", ".join(allowed)
    way_out = f"Did you mean the package {near}?" if near else f"Name one of {listed}, or yours in src/."
    return Fault(typed, f"there is no package {package}.", way_out)


def _argument_faults(where: str, node: Mapping[str, Any], allowed: Sequence[str]) -> list[Fault]:
    target = node[TARGET]
    typed = f"{where}.{TARGET}={target}"
    may_name = [*allowed, *own_packages()]
    try:
        found = locate(target, may_name)
    except NotThere as missing:
        meant = _nearest_name(target, missing, may_name)
        return [Fault(typed, f"{missing}.", f"Did you mean {where}.{TARGET}={meant}?" if meant else _NO_SUCH)]
    except PermissionError as refused:
        return [_refused(typed, str(refused), allowed)]
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        return [Fault(typed, f"{getattr(error, 'filename', '')}{line} is not Python: {error}.", "Mend the file.")]
    except ImportError as error:
        return [import_fault(where, target, error)]
    if isinstance(found, ModuleType):
        names = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        names = [name for name in names if not name.startswith("_")][:_LISTED]
        return [Fault(typed, "it is a module.", f"Name one of those in it: {', '.join(names)}." if names else _NO_SUCH)]
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # a C function: its call raises
        return []
    return bind(where, node, signature)


def own_packages() -> list[str]:
    """Returns the packages and modules of the project's ``src/``."""
    found = project.sources().glob("[!._]*")
    return sorted({path.stem for path in found if path.is_dir() or path.suffix == ".py"})


def _nearest_name(target: str, missing: NotThere, may_name: Sequence[str]) -> str:
    """Returns the most similar class or function of the module; empty if none."""
    name, left = missing.name or "", missing.names[:]
    while near := nearest(name, left):
        left.remove(near)
        if name[:1].isupper() and not near[:1].isupper():
            continue
        meant = ".".join(near if part == name else part for part in target.split("."))
        try:
            if not isinstance(locate(meant, may_name), ModuleType):
                return meant
        except (PermissionError, SyntaxError, UnicodeDecodeError, ImportError):
            continue
    return ""


def bind(where: str, node: Mapping[str, Any], signature: Signature) -> list[Fault]:
    """Returns faults of unknown and missing arguments of one node; ``signature`` is its target's."""
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
        elif name not in accepted and not of_kind(Parameter.VAR_KEYWORD):
            near = next((one for one in _ARGUMENTS.get(name, ()) if one in accepted), None) or nearest(name, accepted)
            way_out = f"Did you mean {where}.{near}={value}?" if near else f"It takes: {', '.join(accepted)}."
            faults.append(Fault(typed, f"{target} has no argument {name}.", way_out))
    for parameter in [*positional, *of_kind(Parameter.KEYWORD_ONLY)] if handed_over != "any" else ():
        has_value = parameter.name in taken or (parameter.name in given and parameter.name in accepted)
        if parameter.default is Parameter.empty and not has_value:
            way_out = f"Add +{where}.{parameter.name}=<value>"
            faults.append(Fault(where, f"{target} needs the argument {parameter.name}.", way_out))
    return faults
