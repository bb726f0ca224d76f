"""Finds every fault of a configuration that did not compose.

Hydra stops at the first fault. The search reads each override alone, checks choices against the files, composes the
valid ones, sets each value alone on that base, and checks the result with `examine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from wellfed.command_line import command
from wellfed.config.faults.check_composed import examine
from wellfed.config.faults.explain_refusal import explain, explain_delete, nearest_knob, ours_for
from wellfed.config.faults.file_faults import ForgivingRepository, merge_files, show_file
from wellfed.config.faults.gone import GONE
from wellfed.config.faults.override_faults import Typed, choice_fault, first_values, is_choice, read_overrides
from wellfed.config.hydra_internals import add_searchpath, chosen_files, repository_of, set_value
from wellfed.config.hydra_session import COMPOSE_ERRORS, SCHEMAS, job_of
from wellfed.config.knobs import all_knobs, entries, is_free
from wellfed.config.schema import RunConfig, TuneRunConfig
from wellfed.errors import Fault


def find_faults(
    loader: ConfigLoader, config_name: str, overrides: Sequence[str], cause: Exception | None, *, multirun: bool = False
) -> list[Fault]:
    """Returns all faults: first the command line's, in its order.

    Args:
        cause: Hydra's error, reported if the search finds nothing. None = Hydra composed it.
        multirun: whether a knob may have several values.
    """
    repo = ForgivingRepository(repository_of(loader))
    if repo.load_config(config_name) is None:
        names = [name for name in repo.get_group_options("") if not name.endswith("_schema") and name[0] != "_"]
        return [Fault(f"--config-name {config_name}", "there is no such file.", f"There are: {', '.join(names)}.")]
    typed = read_overrides(overrides, multirun=multirun, loader=loader)
    with suppress(*COMPOSE_ERRORS):  # Hydra has reported faults of hydra.searchpath
        add_searchpath(loader, repo, config_name, [one.parsed for one in typed if one.parsed is not None])
    found = _Search(loader, repo, config_name, typed).run()
    if cause is None or found:
        return found
    return [Fault("configuration", " ".join(str(cause).split())[:500], "HYDRA_FULL_ERROR=1 shows where.")]


class _Search:
    """A search for faults. The steps of `run` fill ``typed_faults``, ``from_files`` and ``doubted`` in order."""

    def __init__(self, loader: ConfigLoader, repo: ForgivingRepository, config_name: str, typed: list[Typed]) -> None:
        self.loader = loader
        self.repo = repo
        self.config_name = config_name
        self.typed = typed
        primary = repo.load_config(config_name)
        defaults = _with_included(repo, primary.defaults_list or []) if primary else []
        self.declared = {one.group for one in defaults if isinstance(one, GroupDefault) and one.group}
        listed = [str(one.path) for one in defaults if isinstance(one, ConfigDefault)]
        self.schema = next((schema for name, (schema, _) in SCHEMAS.items() if name in listed), RunConfig)
        self.knobs = entries(self.schema)
        self.names = {one.parsed.key_or_group for one in typed if one.parsed is not None and one.fault is None}
        self.typed_faults = [(index, one.fault) for index, one in enumerate(typed) if one.fault]
        """(index of the override, its fault)."""
        self.from_files: list[Fault] = []
        self.doubted: set[str] = set()
        """Knobs with a value that the user did not mean; faults that mention them are left out."""

    def run(self) -> list[Fault]:
        self._check_choices()
        cfg = self._compose_files()
        examined: list[Fault] = []
        if is_dataclass(OmegaConf.get_type(cfg)):
            added = self._set_values(cfg)
            with job_of(cfg) as job:
                examined = examine(job, self.doubted, imports=bool(added))[1]
            for index, dotted in added:
                if not any(dotted in str(fault) for fault in examined):
                    text, owner = self.typed[index].text, dotted.rpartition(".")[0]
                    self._add_fault(index, f"{owner} does not list it so far.", f"Add it: +{text}")
        ordered = [fault for _, fault in sorted(self.typed_faults, key=lambda pair: pair[0])]
        return list(dict.fromkeys([*ordered, *self.from_files, *examined]))

    def _add_fault(self, index: int, problem: str, way_out: str) -> None:
        self.typed_faults.append((index, Fault(self.typed[index].text, problem, way_out)))

    def _usable(self, *, choices: bool) -> list[tuple[int, Override]]:
        bad = {index for index, _ in self.typed_faults}
        return [
            (index, one.parsed)
            for index, one in enumerate(self.typed)
            if one.parsed is not None and index not in bad and is_choice(one.parsed, self.repo) == choices
        ]

    def _check_choices(self) -> None:
        required = {name for name, entry in self.knobs.items() if entry.is_group} & self.declared
        for index, parsed in self._usable(choices=True):
            fault = choice_fault(parsed, self.repo, required, self.declared)
            if fault:
                self.typed_faults.append((index, fault))
                self._doubt(parsed.key_or_group)
        for index, parsed in self._usable(choices=False):
            group = parsed.key_or_group
            if group in self.declared and "." not in group and group not in self.knobs:
                self._add_fault(index, f"{group} has no options.", f"No folder {group}/ is searched.")

    def _compose_files(self) -> DictConfig:
        cfg, refused = merge_files(self.loader, self._defaults_list(), self.repo)
        for path, fault in self.repo.unreadable.items():
            self.from_files.append(fault)
            self._doubt(path.partition("/")[0])
        for dotted, fault in refused:
            self.from_files.append(fault)
            self.doubted.add(dotted)
        OmegaConf.set_struct(cfg, True)
        return cfg

    def _defaults_list(self) -> list[ResultDefault]:
        """Returns the chosen files for all choices that work together; records the faults of the others."""
        chosen = self._usable(choices=True)
        try:
            return chosen_files(self.repo, self.config_name, [parsed for _, parsed in chosen])
        except COMPOSE_ERRORS:
            pass
        try:
            listed = chosen_files(self.repo, self.config_name, [])
        except COMPOSE_ERRORS as error:
            where = f"defaults of {show_file(self.repo.file_of(self.config_name))}"
            self.from_files.append(Fault(where, *_defaults_fault(error)))
            return []
        kept: list[Override] = []
        for index, parsed in chosen:
            try:
                listed = chosen_files(self.repo, self.config_name, [*kept, parsed])
            except COMPOSE_ERRORS as error:
                self._add_fault(index, *_defaults_fault(error))
                if parsed.key_or_group in self.declared:
                    self._doubt(parsed.key_or_group)
            else:
                kept.append(parsed)
        return listed

    def _set_values(self, cfg: DictConfig) -> list[tuple[int, str]]:
        """Sets each value alone; returns (index, name) of new arguments of free nodes that lack a ``+``."""
        added = []
        for index, parsed in self._single_values():
            dotted = parsed.key_or_group
            try:
                if parsed.is_delete() and dotted in self.knobs:
                    raise ValueError("Hydra takes away some knobs and not others")
                set_value(cfg, parsed)
            except COMPOSE_ERRORS as error:
                if is_free(dotted) and not parsed.is_delete() and _can_be_set(cfg, parsed):
                    added.append((index, dotted))
                else:
                    self._add_value_fault(index, parsed, error)
            else:
                self.doubted.discard(dotted)
        return added

    def _single_values(self) -> Iterator[tuple[int, Override]]:
        """Yields each value to set; axes of a multirun value by value."""
        for index, parsed in self._usable(choices=False):
            if not parsed.is_sweep_override():
                yield index, parsed
            elif parsed.is_discrete_sweep():
                texts = [f"{parsed.get_key_element()}={value}" for value in first_values(parsed, 100)]
                yield from ((index, one.parsed) for one in read_overrides(texts, multirun=False) if one.parsed)

    def _add_value_fault(self, index: int, parsed: Override, error: Exception) -> None:
        text, dotted = parsed.input_line or self.typed[index].text, parsed.key_or_group
        ours, note = "", ""
        is_gone = dotted in GONE
        if dotted not in self.knobs and not parsed.is_delete() and not is_gone:
            value = text.partition("=")[2]
            ours, note = ours_for(dotted, value, self.knobs)
            if self.schema is RunConfig and dotted in entries(TuneRunConfig):
                ours, note = "", f"It is a knob of {command('tune')}: write it there."
            if (knob := self.knobs.get(ours)) is not None and not knob.is_group:
                note = f"It must be {knob.must_be}. {note}".rstrip()
        near = nearest_knob(self.schema, dotted) if not (ours or note or is_gone or dotted in self.knobs) else None
        meant = ours.partition("=")[0].lstrip("+") or near
        if parsed.is_delete():
            problem, way_out = explain_delete(self.schema, dotted)
        else:
            problem, way_out = explain(self.schema, dotted, error)
            if near:
                ours = f"{near}={text.partition('=')[2]}"
            way_out = f"Did you mean {ours}? {note}".rstrip() if ours else note or way_out
        self.typed_faults.append((index, Fault(text, problem, way_out)))
        if not meant:
            self.doubted.add(dotted)
        elif meant not in self.names:
            self.doubted |= self._inside(meant) - self.names

    def _doubt(self, group: str) -> None:
        """Marks the knobs of ``group`` as unknown; for a group outside the schema, such as experiment, all knobs."""
        self.doubted |= (self._inside(group) or set(all_knobs(self.schema))) - self.names

    def _inside(self, name: str) -> set[str]:
        """Returns the knobs of a group, or the knob itself."""
        return {knob for knob in all_knobs(self.schema) if knob == name or knob.startswith(f"{name}.")}


def _with_included(repo: ForgivingRepository, listed: Sequence[Any]) -> list[Any]:
    """Returns a list of defaults, followed by the lists of the primary configs that it includes."""
    found, seen = list(listed), {"_self_"}
    for one in found:  # the list grows during the loop
        if isinstance(one, ConfigDefault) and (path := str(one.path)) not in seen:
            seen.add(path)
            included = repo.load_config(path)
            found += (included.defaults_list or []) if included else []
    return found


def _defaults_fault(error: Exception) -> tuple[str, str]:
    """Returns problem and way out of Hydra's error about a defaults list."""
    options = getattr(error, "options", None)
    lines = [line.strip() for line in str(error).split("Config search path")[0].splitlines() if line.strip()]
    way_out = f"There are: {', '.join(options)}." if options else " ".join(lines[1:3])[:300]
    return f"{lines[0].rstrip('.')}." if lines else type(error).__name__, way_out


def _can_be_set(cfg: DictConfig, parsed: Override) -> bool:
    try:
        with open_dict(cfg):
            OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), merge=True, force_add=True)
    except COMPOSE_ERRORS:
        return False
    return True
