"""Finds the faults of a configuration that did not compose.

Hydra stops at the first fault. The search returns all faults of the command line and of the entries of files. Only if
there are none, the composed configuration is checked with `examine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from wellfed.command_line import command
from wellfed.config.faults.check_composed import examine
from wellfed.config.faults.explain_refusal import explain, explain_delete
from wellfed.config.faults.file_faults import NamingRepository, merge_files
from wellfed.config.faults.override_faults import Typed, choice_fault, first_values, is_choice, read_overrides
from wellfed.config.faults.target_faults import nearest_argument
from wellfed.config.hydra_internals import add_searchpath, chosen_files, repository_of, set_value
from wellfed.config.hydra_session import COMPOSE_ERRORS, job_of
from wellfed.config.knobs import entries, is_free
from wellfed.config.schema import RunConfig, TuneRunConfig
from wellfed.errors import ConfigError, Fault

_GROUPS = tuple(name for name, entry in entries(RunConfig).items() if entry.is_group)
"""Groups of which every run needs an option."""


def find_faults(
    loader: ConfigLoader, config_name: str, overrides: Sequence[str], cause: Exception | None, *, multirun: bool = False
) -> list[Fault]:
    """Returns the faults: first the command line's, in its order.

    Args:
        cause: Hydra's error, reported if the search finds nothing. None = Hydra composed it.
        multirun: whether a knob may have several values.
    """
    repo = NamingRepository(repository_of(loader))
    typed = read_overrides(overrides, multirun=multirun, loader=loader)
    faults = {index: one.fault for index, one in enumerate(typed) if one.fault}
    try:
        if repo.load_config(config_name) is None:
            names = [name for name in repo.get_group_options("") if not name.endswith("_schema") and name[0] != "_"]
            return [Fault(f"--config-name {config_name}", "there is no such file.", f"There are: {', '.join(names)}.")]
        with suppress(*COMPOSE_ERRORS):  # Hydra has reported faults of hydra.searchpath
            add_searchpath(loader, repo, config_name, [one.parsed for one in typed if one.parsed is not None])
        found = _search(loader, repo, config_name, typed, faults)
    except ConfigError as unreadable:
        found = [*faults.values(), *unreadable.faults]
    if cause is None or found:
        return found
    return [Fault("configuration", " ".join(str(cause).split())[:500], "HYDRA_FULL_ERROR=1 shows where.")]


def _search(
    loader: ConfigLoader, repo: NamingRepository, config_name: str, typed: list[Typed], faults: dict[int, Fault]
) -> list[Fault]:
    """Returns the faults of options, of files, and of values, each set alone; else those of the whole.

    Args:
        faults: index of an override -> its fault; more are added.
    """
    parsed = {index: one.parsed for index, one in enumerate(typed) if one.parsed is not None and index not in faults}
    choices = {index: one for index, one in parsed.items() if is_choice(one, repo)}
    for index, choice in choices.items():
        if fault := choice_fault(choice, repo, _GROUPS):
            faults[index] = fault
    cfg, from_files = _merged_files(loader, repo, config_name, [choices[at] for at in choices if at not in faults])
    schema_type: Any = OmegaConf.get_type(cfg)
    for index, each in parsed.items() if is_dataclass(schema_type) else ():
        for one in _single_values(each) if index not in choices else ():
            try:
                if one.is_delete() and one.key_or_group in entries(schema_type):
                    raise ValueError("Hydra takes away some knobs and not others")
                set_value(cfg, one)
            except COMPOSE_ERRORS as error:
                faults.setdefault(index, _unlisted(cfg, one) or _value_fault(schema_type, one, error))
    if faults or from_files:
        return [*(fault for _, fault in sorted(faults.items())), *from_files]
    with job_of(cfg) as job:
        return examine(job)[1]


def _merged_files(
    loader: ConfigLoader, repo: NamingRepository, config_name: str, choices: list[Override]
) -> tuple[DictConfig, list[Fault]]:
    """Returns the configuration of all files that choices without a fault name, and the faults of its entries."""
    try:
        listed = chosen_files(repo, config_name, choices)
    except COMPOSE_ERRORS as error:
        text = str(error)
        for one in choices:
            if f" for {one.key_or_group}." in text and one.is_add():
                way_out = f"Write {(one.input_line or '').lstrip('+')}."
                return OmegaConf.create(), [Fault(str(one.input_line), "an option is chosen already.", way_out)]
        named = (one.input_line for one in choices if f"'{one.key_or_group}" in text)
        return OmegaConf.create(), [Fault(next(named, None) or "defaults list", *_defaults_fault(error))]
    cfg, refused = merge_files(loader, listed, repo)
    OmegaConf.set_struct(cfg, True)
    return cfg, refused


def _single_values(parsed: Override) -> Iterator[Override]:
    """Yields each value to set; that of an axis of a multirun value by value."""
    if not parsed.is_sweep_override():
        yield parsed
    elif parsed.is_discrete_sweep():
        texts = [f"{parsed.get_key_element()}={value}" for value in first_values(parsed, 100)]
        yield from (one.parsed for one in read_overrides(texts, multirun=False) if one.parsed)


def _value_fault(schema_type: type, parsed: Override, error: Exception) -> Fault:
    text, dotted = parsed.input_line or "", parsed.key_or_group
    if parsed.is_delete():
        return Fault(text, *explain_delete(schema_type, dotted))
    if schema_type is RunConfig and dotted in entries(TuneRunConfig).keys() - entries(RunConfig).keys():
        return Fault(text, "no such knob.", f"It is a knob of {command('tune')}: write it there.")
    return Fault(text, *explain(schema_type, dotted, error, value=text.partition("=")[2]))


def _defaults_fault(error: Exception) -> tuple[str, str]:
    """Returns problem and way out of Hydra's error about a defaults list."""
    options = getattr(error, "options", None)
    lines = [line.strip() for line in str(error).split("Config search path")[0].splitlines() if line.strip()]
    way_out = f"There are: {', '.join(options)}." if options else " ".join(lines[1:3])[:300]
    return f"{lines[0].rstrip('.')}." if lines else type(error).__name__, way_out


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
