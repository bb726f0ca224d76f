"""Checks each `_target_` and its arguments: package, name, and signature.

`check_static` imports nothing. It refuses malformed names, and packages that are not installed.
`check_imported` imports the targets and binds their arguments, after torch is imported and before data is read. Values
are checked by the target's constructor, which raises ValueError or TypeError.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

from wellfed import project
from wellfed.config.faults.explain_refusal import nearest
from wellfed.config.hydra_internals import locate
from wellfed.config.hydra_session import as_written
from wellfed.config.schema import RunConfig
from wellfed.errors import Fault, first_line, is_the_users
from wellfed.extras import PACKAGES, absence, absent_package, is_installed

TARGET, POSITIONAL, PARTIAL, RECURSIVE = "_target_", "_args_", "_partial_", "_recursive_"
KEYS = frozenset({TARGET, POSITIONAL, PARTIAL, RECURSIVE, "_convert_"})
"""Keys of ``hydra.utils.instantiate``; all others are arguments."""
_LISTED = 8
"""Maximum number of names in a message."""
_HANDED_OVER = {"workload.model": "any", "workload.optimizer": "first"}
"""Nodes whose required arguments are passed at run time: by `Datasets.model_args`, and the optimizer's parameters."""
_SCHEDULER = re.compile(r"workload\.schedule(\.schedulers\[\d+\])*")

_USUAL = ("torch", "lightning", "torchmetrics", "wellfed")
"""Packages proposed for a misspelled one, besides those of ``src/``."""
_ARGUMENTS = {"learning_rate": ("lr",), "lr": ("learning_rate",), "wd": ("weight_decay",), "p": ("dropout",)}
"""Unknown argument -> names for it in other libraries."""


def check_static(config: RunConfig) -> list[Fault]:
    """Returns the faults of all targets that can be found without importing anything."""
    faults: list[Fault] = []
    for where, node in _configured(config):
        targets = list(_targets(where, node))
        if not (targets if where == "workload.metrics" else is_target(node)):
            way_out = f"Set {where}.{TARGET}=<package>.<module>.<name>."
            faults.append(Fault(where, f"names nothing to build: it has no {TARGET}.", way_out))
        faults += [fault for at, inner in targets for fault in _name_faults(at, inner[TARGET])]
    return faults


def check_imported(config: RunConfig) -> list[Fault]:
    """Imports all targets (torch included) and returns the faults of their names and arguments.

    Targets refused by `check_static` are skipped.
    """
    targets = [each for outer, configured in _configured(config) for each in _targets(outer, configured)]
    named = [(where, node) for where, node in targets if not _name_faults(where, node[TARGET])]
    return [fault for where, node in named for fault in _argument_faults(where, node)]


def _configured(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of each entry that must have a `_target_`."""
    workload, callbacks = config.workload, config.callbacks if isinstance(config.callbacks, Mapping) else {}
    optional = {f"workload.{name}": getattr(workload, name) for name in ("data", "optimizer", "metrics")}
    optional |= {"workload.schedule": workload.schedule.target}
    optional |= {f"callbacks.{name}": node for name, node in callbacks.items()}
    yield "workload.model", workload.model
    yield from ((name, node) for name, node in optional.items() if node is not None)


def is_target(node: Any) -> bool:
    """Returns whether a node has a `_target_`."""
    return isinstance(node, Mapping) and TARGET in node


def _targets(where: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every node with a `_target_` that is built, and its dotted name, outer ones first."""
    if isinstance(node, Mapping):
        if is_target(node):
            yield where, node
        for key, value in node.items() if node.get(RECURSIVE, True) else ():
            yield from _targets(f"{where}.{key}", value)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _targets(f"{where}[{index}]", value)


def _name_faults(where: str, target: Any) -> list[Fault]:
    typed = f"{where}.{TARGET}={target}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return [Fault(typed, "is not a dotted name.", f"Set {where}.{TARGET}=<package>.<module>.<name>.")]
    package = target.partition(".")[0]
    if is_installed(package):
        return []
    if package in PACKAGES:
        return [Fault(typed, *absence(package))]
    own = {path.stem for path in project.sources().glob("[!._]*") if path.is_dir() or path.suffix == ".py"}
    near = nearest(package, sorted({*_USUAL, *own}))
    way_out = f"Did you mean the package {near}?" if near else "Install it, or name a package of src/."
    return [Fault(typed, f"there is no package {package}.", way_out)]


def _argument_faults(where: str, node: Mapping[str, Any]) -> list[Fault]:
    target = node[TARGET]
    try:
        found = locate(target)
    except ImportError as error:
        return [import_fault(where, target, error)]
    if not callable(found):
        return [uncallable_fault(where, target, found)]
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # a C function: its call raises
        return []
    return bind(where, node, signature)


def nearest_argument(name: str, accepted: Sequence[str]) -> str | None:
    """Returns the argument that a wrong name most likely means: its name in other libraries, or a near one."""
    return next((one for one in _ARGUMENTS.get(name, ()) if one in accepted), None) or nearest(name, accepted)


def bind(where: str, node: Mapping[str, Any], signature: Signature) -> list[Fault]:
    """Returns faults of unknown and missing arguments of one node; ``signature`` is its target's."""
    target = node[TARGET]
    given = {key: value for key, value in node.items() if key not in KEYS}
    handed_over = "any" if node.get(PARTIAL) else _HANDED_OVER.get(where, "none")
    of_kind: dict[Any, list[str]] = defaultdict(list)
    for parameter in signature.parameters.values():
        of_kind[parameter.kind].append(parameter.name)
    either, keyword_only = of_kind[Parameter.POSITIONAL_OR_KEYWORD], of_kind[Parameter.KEYWORD_ONLY]
    positional, accepted = of_kind[Parameter.POSITIONAL_ONLY] + either, either + keyword_only
    taken = {*positional[: len(node.get(POSITIONAL, ())) + (handed_over == "first")]}
    if _SCHEDULER.fullmatch(where):
        taken.add("optimizer")
    faults = []
    for name, value in given.items():
        typed = f"{where}.{name}={value}"
        if name in taken and name in accepted:
            faults.append(Fault(typed, f"{target} is handed {name} already.", f"Take it away: ~{where}.{name}"))
        elif name not in accepted and not of_kind[Parameter.VAR_KEYWORD]:
            near = nearest_argument(name, accepted)
            way_out = f"Did you mean {where}.{near}={value}?" if near else f"It takes: {', '.join(accepted)}."
            faults.append(Fault(typed, f"{target} has no argument {name}.", way_out))
        elif isinstance(value, str) and is_number(value) and _takes_a_number(signature.parameters.get(name)):
            faults.append(Fault(typed, f"{target} takes a number there.", about_text(f"{where}.{name}", value)))
    for name in [*positional, *keyword_only] if handed_over != "any" else ():
        has_value = name in taken or (name in given and name in accepted)
        if signature.parameters[name].default is Parameter.empty and not has_value:
            faults.append(Fault(where, f"{target} needs the argument {name}.", f"Add +{where}.{name}=<value>"))
    return faults


def _takes_a_number(parameter: Parameter | None) -> bool:
    """Returns whether the annotation, or else the default, of a parameter is a number and no text."""
    if parameter is None or parameter.annotation is Parameter.empty:
        return parameter is not None and type(parameter.default) in (int, float)
    words = set(re.findall(r"\w+", inspect.formatannotation(parameter.annotation)))
    return bool(words & {"int", "float", "bool"}) and words <= {
        *("int", "float", "bool", "None", "NoneType", "Optional", "Union", "Tensor", "typing", "torch")
    }


def is_number(text: str) -> bool:
    """Returns whether a text is a number, or ``true`` or ``false``."""
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|true|false", text, re.IGNORECASE) is not None


def about_text(name: str, value: str) -> str:
    """Returns where the text of an argument comes from, and how to make it a number."""
    written = as_written(name)
    if "${" not in written:
        return f"{name} is the text '{value}': write {value} without quotes."
    inner = re.search(r"\$\{oc\.env:[^{}]*\}", written)
    decoded = f"${{oc.decode:{inner[0] if inner else written}}}"
    return f"{name} is the text '{value}', by {written}; oc.env gives text. Write {decoded} for a number."


def import_fault(where: str, target: str, error: BaseException) -> Fault:
    """Returns the fault of a target that can't be imported: a package to install, a near name, or the file to mend.

    Raises:
        Exception: ``error`` itself, if the code of an imported module raised another kind.
    """
    cause = error.__cause__ or error
    typed, way_out = f"{where}.{TARGET}={target}", "Name a class or function of a module on the path."
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        absent = absent_package(cause) or ("" if target.startswith(cause.name) else cause.name)
        if absent:
            return Fault(typed, *absence(absent))
    elif isinstance(cause, SyntaxError):
        return Fault(typed, f"{cause.filename}:{cause.lineno} is not Python: {cause}.", "Mend the file.")
    elif isinstance(cause, ImportError) and line_of(cause):
        return Fault(typed, f"can't be imported: {first_line(cause)}{line_of(cause)}.", "Mend that import.")
    elif not isinstance(cause, (ImportError, AttributeError, ValueError)) or line_of(cause):
        raise cause
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner = locate(".".join(parts[:count]))
        except (ImportError, ValueError):
            continue
        names = {*dir(owner), *(each.name for each in pkgutil.iter_modules(getattr(owner, "__path__", ())))}
        is_class = parts[count][:1].isupper()
        near = nearest(parts[count], sorted(n for n in names if n[:1] != "_" and n[:1].isupper() == is_class))
        if near:
            way_out = f"Did you mean {where}.{TARGET}={'.'.join([*parts[:count], near, *parts[count + 1 :]])}?"
        return Fault(typed, f"{'.'.join(parts[:count])} has no {parts[count]}.", way_out)
    return Fault(typed, f"can't be imported: {first_line(cause)}.", way_out)


def uncallable_fault(where: str, target: str, found: Any) -> Fault:
    """Returns the fault of a target that is a module or a value."""
    inside = vars(found).items() if isinstance(found, ModuleType) else ()
    names = [name for name, value in inside if inspect.getmodule(value) is found and name[:1] != "_"]
    way_out = f"Name one of those in it: {', '.join(names[:_LISTED])}." if names else "Name a class or function."
    return Fault(f"{where}.{TARGET}={target}", f"is no class or function, but a {type(found).__name__}.", way_out)


def line_of(error: BaseException) -> str:
    """Returns file and line of the user's code that raised, in brackets; empty if no code of the user did."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if is_the_users(one.filename)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
