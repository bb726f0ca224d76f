"""Finds the faults of a configuration that did not compose.

Hydra stops at the first fault. Here each override is set alone, so that all faults of the command line are found. A
file is reported as Hydra does, by its first fault. Only if there are none, the whole is checked with `examine`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from wellfed.command_line import command
from wellfed.config.faults.check_composed import examine
from wellfed.config.faults.explain_refusal import explain
from wellfed.config.faults.gone import what_instead
from wellfed.config.faults.override_faults import choice_fault, first_values, is_choice, read_overrides
from wellfed.config.faults.target_faults import nearest_argument
from wellfed.config.hydra_internals import searched_files, set_value
from wellfed.config.hydra_session import COMPOSE_ERRORS, job_of
from wellfed.config.knobs import entries, is_free
from wellfed.config.schema import RunConfig, TuneRunConfig
from wellfed.errors import Fault, first_line


def find_faults(
    loader: ConfigLoader, config_name: str, overrides: Sequence[str], cause: Exception, *, multirun: bool = False
) -> list[Fault]:
    """Returns the faults: first the command line's, in its order.

    Args:
        cause: Hydra's error, reported if the search finds nothing.
        multirun: whether a knob may have several values.
    """
    typed = read_overrides(overrides, multirun=multirun, loader=loader)
    faults = {index: one.fault for index, one in enumerate(typed) if one.fault}
    parsed = {index: one.parsed for index, one in enumerate(typed) if one.parsed is not None and index not in faults}
    try:
        repo = searched_files(loader, config_name, [*parsed.values()])
        if not repo.config_exists(config_name):
            names = [name for name in repo.get_group_options("") if not name.endswith("_schema") and name[0] != "_"]
            return [Fault(f"--config-name {config_name}", "there is no such file.", f"There are: {', '.join(names)}.")]
    except COMPOSE_ERRORS as error:
        return [*faults.values(), _file_fault(error, [])]
    choices = {index: one for index, one in parsed.items() if is_choice(one, repo)}
    for index, choice in choices.items():
        if fault := choice_fault(choice, repo):
            faults[index] = fault
    own = {at: one for at, one in parsed.items() if at in choices or one.key_or_group == "hydra.searchpath"}
    files = [one.input_line or "" for at, one in own.items() if at not in faults and not one.is_sweep_override()]
    try:
        cfg = loader.load_configuration(config_name, files, RunMode.MULTIRUN)
    except COMPOSE_ERRORS as error:
        return [*(fault for _, fault in sorted(faults.items())), _file_fault(error, [*choices.values()])]
    schema_type: Any = OmegaConf.get_type(cfg)
    values = [(at, value) for at, one in parsed.items() if at not in own for value in _single_values(one)]
    for index, one in values if is_dataclass(schema_type) else ():
        try:
            set_value(cfg, one)
        except COMPOSE_ERRORS as error:
            faults.setdefault(index, _unlisted(cfg, one) or _value_fault(schema_type, one, error))
    if faults:
        return [fault for _, fault in sorted(faults.items())]
    with job_of(cfg) as job:
        found = examine(job)[1]
    return found or [_file_fault(cause, [])]


def _single_values(parsed: Override) -> list[Override]:
    """Returns each value to set; of an axis of a multirun the first ones."""
    if not parsed.is_sweep_override():
        return [parsed]
    values = first_values(parsed, 100) if parsed.is_discrete_sweep() else []
    texts = [f"{parsed.get_key_element()}={value}" for value in values]
    return [one.parsed for one in read_overrides(texts, multirun=False) if one.parsed]


def _file_fault(error: Exception, choices: Sequence[Override]) -> Fault:
    """Returns Hydra's error about a file or a defaults list, by the file's name and the knob if it has them."""
    text = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        way_out = "Indent with blanks, never tabs." if "\\t" in text else "Check indentation and colons there."
        problem = f"is not yaml at column {mark.column + 1}: {error.problem}."
        return Fault(f"{mark.name}:{mark.line + 1}", problem, way_out)
    if refused := re.match(r"In '(.*)': \w+ raised while composing config:\n(.*)\n +full_key: ([^\n]+)", text):
        file, reason, dotted = refused.groups()
        return Fault(f"{file}.yaml: {dotted}", *explain(RunConfig, dotted, ValueError(reason)))
    where = "configuration"
    for one in choices:
        if f"'{one.key_or_group}" in text:
            where = one.input_line or where
        elif one.is_add() and f" for {one.key_or_group}." in text:
            way_out = f"Write {(one.input_line or '').lstrip('+')}."
            return Fault(str(one.input_line), "an option is chosen already.", way_out)
    if options := getattr(error, "options", None):
        return Fault(where, f"{text.splitlines()[0]}.", f"There are: {', '.join(options)}.")
    reason = " ".join(re.split(r"Config search path|full_key:", text)[0].split()).rstrip(".")[:500]
    return Fault(where, f"{reason or type(error).__name__}.", "HYDRA_FULL_ERROR=1 shows where.")


def _value_fault(schema_type: type, parsed: Override, error: Exception) -> Fault:
    text, dotted = parsed.input_line or "", parsed.key_or_group
    if parsed.is_delete():
        return Fault(text, f"{first_line(error).rstrip('.')}.", what_instead(dotted) or "Set another value instead.")
    if schema_type is RunConfig and dotted in entries(TuneRunConfig).keys() - entries(RunConfig).keys():
        return Fault(text, "no such knob.", f"It is a knob of {command('tune')}: write it there.")
    return Fault(text, *explain(schema_type, dotted, error, value=text.partition("=")[2]))


def _unlisted(cfg: DictConfig, parsed: Override) -> Fault | None:
    """Returns the fault of an argument of a free node that its yaml does not list, and which lacks a ``+``."""
    dotted, text = parsed.key_or_group, parsed.input_line or ""
    group, _, name = dotted.rpartition(".")
    owner = OmegaConf.select(cfg, group) if is_free(dotted) and not parsed.is_delete() else None
    if not isinstance(owner, DictConfig) or name in owner:
        return None
    near = nearest_argument(name, [*map(str, owner)])
    meant = f"Did you mean {group}.{near}={text.partition('=')[2]}? " if near else ""
    return Fault(text, f"{group} does not list it so far.", f"{meant}Add it: +{text}")
