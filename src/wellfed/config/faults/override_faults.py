"""Finds faults of overrides: their grammar, and choices of options without a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from wellfed.config.faults.explain_refusal import nearest, our_value
from wellfed.config.faults.gone import what_instead
from wellfed.config.hydra_internals import IConfigRepository
from wellfed.config.knobs import in_order
from wellfed.errors import Fault
from wellfed.extras import install

MOST_VALUES = 100_000
"""Most values of one axis."""
EXTRAS = {
    "hydra/launcher=ray": "ray",
    "hydra/launcher=submitit_slurm": "slurm",
    "hydra/launcher=submitit_local": "slurm",
}
"""Options that come with an extra of pyproject.toml."""


@dataclass(frozen=True)
class Typed:
    """One override of the command line."""

    text: str
    parsed: Override | None
    fault: Fault | None
    """Fault in the override itself, without a look at the files; None = there is none."""


def read_overrides(overrides: Sequence[str], *, multirun: bool, loader: ConfigLoader | None = None) -> list[Typed]:
    """Parses each override alone, so that all faults are found.

    Args:
        multirun: whether several values for a name are an axis; else they are a fault.
        loader: for axes that take all options of a group, ``loader=glob(*)``.
    """
    parser = OverridesParser.create()
    typed = []
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
            parsed.config_loader = loader
            if not parsed.key_or_group:
                raise ValueError("no name")
        except (HydraException, ValueError) as error:
            typed.append(Typed(text, None, _grammar_fault(parser, text, error)))
            continue
        fault, name = None, parsed.key_or_group
        if parsed.is_sweep_override() and not multirun:
            values = text.partition("=")[2]
            instead = f"write {name}=[{values}] for a list, {_quoted(name, values)} for a text."
            fault = Fault(text, "names several values, and this is one run.", f"Add -m to run them all, or {instead}")
        elif parsed.is_discrete_sweep():
            try:
                first_values(parsed, MOST_VALUES)
            except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
                problem = f"is an axis that can't be read: {str(error).splitlines()[0].rstrip('.')}."
                fault = Fault(text, problem, f"Name its values: {name}=a,b")
        typed.append(Typed(text, parsed, fault))
    return typed


def first_values(parsed: Override, number: int) -> list[str]:
    """Returns the first values of an axis as typed; a range may be endless."""
    return list(islice(parsed.sweep_string_iterator(), number))


def _grammar_fault(parser: OverridesParser, text: str, error: Exception) -> Fault:
    name, equals, value = text.partition("=")
    quoted = _quoted(name, value)
    if not equals or not name.strip("+~ "):
        problem = "has no name before '='." if equals else "is not an override: it has no '='."
        return Fault(text, problem, "Write knob=value or group=option, e.g. gpu=24gb.")
    reason = str(error).splitlines()[0]
    try:
        parser.parse_override(shlex.split(quoted)[0])
    except (HydraException, ValueError):
        return Fault(text, f"can't be read: {reason}.", "Names are words joined by dots, e.g. loader.num_workers=2.")
    return Fault(text, f"can't be read: {reason}.", f"Close each bracket, or quote a text that holds signs: {quoted}")


def _quoted(name: str, value: str) -> str:
    """Returns ``name="value"`` with quotes for Hydra inside quotes for the shell."""
    return shlex.quote(f"{name}={QuotedString(text=value, quote=Quote.double).with_quotes()}")


def is_choice(parsed: Override, repo: IConfigRepository) -> bool:
    """Returns whether an override picks an option of a group."""
    return not isinstance(parsed._value, dict) and bool(repo.group_exists(parsed.key_or_group))


def choice_fault(parsed: Override, repo: IConfigRepository) -> Fault | None:
    """Returns the fault of one choice of an option, which `is_choice`; None if there is such a file."""
    text, group = parsed.input_line or "", parsed.key_or_group
    for value in () if parsed.is_delete() else _values(parsed):
        if value is None or (isinstance(value, str) and repo.config_exists(f"{group}/{value}")):
            continue
        if (extra := EXTRAS.get(f"{group}={value}")) is not None:
            return Fault(text, f"needs the extra {extra}, which is not installed.", f"Install it: {install(extra)}.")
        if instead := what_instead(f"{group}={value}"):
            return Fault(text, "there is no such option.", instead)
        options = in_order(repo.get_group_options(group, ObjectType.CONFIG))
        listed = f"{group} has {', '.join(options)}." if options else f"No file defines an option of {group}."
        near = our_value(group, str(value)) or nearest(str(value), options)
        meant = near if near and "=" in near else f"{group}={near}"
        way_out = f"{listed} Did you mean {meant}?" if near else listed
        return Fault(text, f"there is no option {value}." if str(value) else "no option is named.", way_out)
    return None


def _values(parsed: Override) -> list[Any]:
    if parsed.is_sweep_override():
        items: list[Any] = list(parsed.sweep_iterator()) if parsed.is_discrete_sweep() else []
    else:
        items = [parsed.value()]
    items = [one for item in items for one in (item if isinstance(item, list) else [item])]  # several go together
    return [item.text if isinstance(item, QuotedString) else item for item in items]
