"""Finds every fault of a configuration that did not compose. Runs only on failure.

Hydra stops at its first. So: read each override alone, hold the choices against the files, compose those that are
right, then set each value alone on that base, and last judge what came out (`examine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass

from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from wellfed.config.examine import examine
from wellfed.config.faults.explain import explain, explain_delete, suggestion
from wellfed.config.faults.file_faults import ForgivingRepository, merge_files, show_file
from wellfed.config.faults.override_faults import Typed, choice_fault, first_values, is_choice, read_overrides
from wellfed.config.hydra_internals import chosen_files, repository_of, set_value
from wellfed.config.knobs import FREE_NODES, all_knobs, entries
from wellfed.config.schema import RunConfig
from wellfed.config.session import COMPOSE_ERRORS, SCHEMAS
from wellfed.errors import Fault


def find_faults(
    loader: ConfigLoader, config_name: str, overrides: Sequence[str], cause: Exception | None, *, multirun: bool = False
) -> list[Fault]:
    """All faults, those of the command line first and in its order.

    Args:
        loader: of the Hydra that failed.
        config_name: primary config.
        overrides: as typed.
        cause: what Hydra raised; told as it is if the search finds nothing. None = Hydra composed it.
        multirun: several values for a knob are then no fault.
    """
    typed = read_overrides(overrides, multirun=multirun, loader=loader)
    for with_hydra in (False, True):  # the second search takes twice as long and is seldom needed
        repo = ForgivingRepository(repository_of(loader), with_hydra=with_hydra)
        if repo.load_config(config_name) is None:
            return [_no_primary(repo, config_name)]
        search = _Search(loader, repo, config_name, typed)
        found = search.run()
        if found and not search.needs_hydra:
            return found
    if cause is None or found:
        return found
    return [Fault("configuration", " ".join(str(cause).split())[:500], "HYDRA_FULL_ERROR=1 shows where.")]


def _no_primary(repo: ForgivingRepository, config_name: str) -> Fault:
    names = [name for name in repo.get_group_options("") if not name.endswith("_schema") and not name.startswith("_")]
    return Fault(f"--config-name {config_name}", "there is no such file.", f"There are: {', '.join(names)}.")


class _Search:
    """One hunt for faults; the steps of `run`, in order, fill ``told`` and ``doubted``."""

    def __init__(self, loader: ConfigLoader, repo: ForgivingRepository, config_name: str, typed: list[Typed]) -> None:
        self.loader = loader
        self.repo = repo
        self.config_name = config_name
        self.typed = typed
        primary = repo.load_config(config_name)
        defaults = (primary.defaults_list or []) if primary else []
        self.declared = {one.group for one in defaults if isinstance(one, GroupDefault) and one.group}
        listed = (SCHEMAS.get(str(one.path)) for one in defaults if isinstance(one, ConfigDefault))
        self.schema = next(filter(None, listed), RunConfig)
        self.told: list[tuple[int, Fault]] = []
        self.from_files: list[Fault] = []
        self.needs_hydra = any(one.parsed is not None and one.parsed.is_hydra_override() for one in typed)
        """Whether Hydra's own files matter for what was found."""
        self.doubted: set[str] = set()
        """Knobs whose value is not what the user meant: rules about them would tell what is not so."""

    def run(self) -> list[Fault]:
        self.told = [(index, one.fault) for index, one in enumerate(self.typed) if one.fault]
        self._check_choices()
        cfg = self._compose_files()
        examined: list[Fault] = []
        if is_dataclass(OmegaConf.get_type(cfg)):
            added = self._set_values(cfg)
            with open_dict(cfg):
                cfg.pop("hydra", None)
            examined = examine(cfg, self.doubted).faults
            for index, dotted in added:
                if not any(dotted in str(fault) for fault in examined):
                    text, owner = self.typed[index].text, dotted.rpartition(".")[0]
                    self.told.append((index, Fault(text, f"{owner} does not list it so far.", f"Add it: +{text}")))
        ordered = [fault for _, fault in sorted(self.told, key=lambda pair: pair[0])]
        return list(dict.fromkeys([*ordered, *self.from_files, *examined]))

    def _usable(self, *, choices: bool) -> list[tuple[int, Override]]:
        bad = {index for index, _ in self.told}
        return [
            (index, one.parsed)
            for index, one in enumerate(self.typed)
            if one.parsed is not None and index not in bad and is_choice(one.parsed, self.repo) == choices
        ]

    def _check_choices(self) -> None:
        required = {name for name, entry in entries(self.schema).items() if entry.is_group} & self.declared
        for index, parsed in self._usable(choices=True):
            fault = choice_fault(self.typed[index], self.repo, required, self.declared)
            if fault:
                self.told.append((index, fault))
                self._doubt(parsed.key_or_group)
        for index, parsed in self._usable(choices=False):
            group = parsed.key_or_group
            if group in self.declared and "." not in group and group not in entries(self.schema):
                fault = Fault(self.typed[index].text, f"{group} has no options.", f"No folder {group}/ is searched.")
                self.told.append((index, fault))

    def _compose_files(self) -> DictConfig:
        chosen = self._usable(choices=True)
        try:
            listed: list[ResultDefault] | None = self._files([parsed for _, parsed in chosen])
        except COMPOSE_ERRORS:
            self.needs_hydra = True  # a file may pick a launcher or sweeper
            listed = self._defaults_one_by_one(chosen)
        cfg, refused = merge_files(self.loader, listed, self.repo) if listed else (OmegaConf.create(), [])
        for path, fault in self.repo.unreadable.items():
            self.from_files.append(fault)
            self._doubt(path.partition("/")[0])
        for dotted, fault in refused:
            self.from_files.append(fault)
            self.doubted.add(dotted)
        OmegaConf.set_struct(cfg, True)
        return cfg

    def _files(self, choices: list[Override]) -> list[ResultDefault]:
        return chosen_files(self.repo, self.config_name, choices)

    def _defaults_one_by_one(self, chosen: list[tuple[int, Override]]) -> list[ResultDefault] | None:
        """The defaults list with the choices that go together; those that don't are told."""
        try:
            listed = self._files([])
        except COMPOSE_ERRORS as error:
            self.from_files.append(self._fault_of_lists(error))
            return None
        kept: list[Override] = []
        for index, parsed in chosen:
            try:
                listed = self._files([*kept, parsed])
            except COMPOSE_ERRORS as error:
                self.told.append((index, self._fault_of_lists(error, self.typed[index].text)))
                if parsed.key_or_group in self.declared:
                    self._doubt(parsed.key_or_group)
            else:
                kept.append(parsed)
        return listed

    def _fault_of_lists(self, error: Exception, text: str | None = None) -> Fault:
        options = getattr(error, "options", None)
        lines = [line.strip() for line in str(error).split("Config search path")[0].splitlines() if line.strip()]
        way_out = f"There are: {', '.join(options)}." if options else " ".join(lines[1:3])[:300]
        where = text or f"defaults of {show_file(self.repo.file_of(self.config_name))}"
        return Fault(where, f"{lines[0].rstrip('.')}." if lines else type(error).__name__, way_out)

    def _set_values(self, cfg: DictConfig) -> list[tuple[int, str]]:
        """Set each value alone; returns new arguments of free nodes that lack a ``+``."""
        added = []
        for index, parsed in self._single_values():
            dotted = parsed.key_or_group
            try:
                if parsed.is_delete() and dotted in entries(self.schema):
                    raise ValueError("Hydra takes away some knobs and not others")
                set_value(cfg, parsed)
            except COMPOSE_ERRORS as error:
                if (
                    not parsed.is_delete()
                    and dotted.startswith(tuple(f"{node}." for node in FREE_NODES))
                    and _can_be_set(cfg, parsed)
                ):
                    added.append((index, dotted))
                else:
                    self._tell_value(index, parsed, error)
            else:
                self.doubted.discard(dotted)
        return added

    def _single_values(self) -> Iterator[tuple[int, Override]]:
        """Each value to set, those of a multirun's axes one by one."""
        for index, parsed in self._usable(choices=False):
            if not parsed.is_sweep_override():
                yield index, parsed
            elif parsed.is_discrete_sweep():
                texts = [f"{parsed.get_key_element()}={value}" for value in first_values(parsed, 100)]
                yield from ((index, one.parsed) for one in read_overrides(texts, multirun=False) if one.parsed)

    def _tell_value(self, index: int, parsed: Override, error: Exception) -> None:
        text, dotted = parsed.input_line or self.typed[index].text, parsed.key_or_group
        meant = suggestion(self.schema, dotted) if dotted not in entries(self.schema) else None
        if parsed.is_delete():
            problem, way_out = explain_delete(self.schema, dotted)
        else:
            problem, way_out = explain(self.schema, dotted, error)
            way_out = f"Did you mean {meant}={text.partition('=')[2]}?" if meant else way_out
        self.told.append((index, Fault(text, problem, way_out)))
        if meant is None:
            self.doubted.add(dotted)
        elif meant not in self._typed_names():
            self.doubted |= self._inside(meant) - self._typed_names()

    def _typed_names(self) -> set[str]:
        return {one.parsed.key_or_group for one in self.typed if one.parsed is not None and one.fault is None}

    def _doubt(self, group: str) -> None:
        """What ``group`` would have set is unknown; of a group outside the schema (experiment) that is anything."""
        self.doubted |= (self._inside(group) or set(all_knobs(self.schema))) - self._typed_names()

    def _inside(self, name: str) -> set[str]:
        """The knobs of a group, or the knob itself."""
        return {knob for knob in all_knobs(self.schema) if knob == name or knob.startswith(f"{name}.")}


def _can_be_set(cfg: DictConfig, parsed: Override) -> bool:
    try:
        with open_dict(cfg):
            OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), merge=True, force_add=True)
    except COMPOSE_ERRORS:
        return False
    return True
