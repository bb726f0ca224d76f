"""Wraps all uses of ``hydra._internal``, which a new version of Hydra may break.

``tests/config/test_hydra_internals.py`` runs this file on the lowest and the highest allowed version.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra._internal.utils import get_args_parser as command_line_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

__all__ = ["CachingConfigRepository", "Hydra", "IConfigRepository", "command_line_parser"]


@dataclass(frozen=True)
class _Composition:
    """Composed configuration of a point of a multirun."""

    master: DictConfig
    overrides: Sequence[Override]
    """The point's own."""
    config: DictConfig


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, which keeps what it has composed, for later points."""

    _composed: _Composition | None = None
    """The latest point that was composed from files."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Composes as Hydra does. A point that differs from an earlier one in plain values is made from that."""
        overrides = OverridesParser.create().parse_overrides(sweep_overrides)
        earlier = self._composed
        if earlier is not None and earlier.master is master_config:
            changed = _changed_values(earlier, overrides)
            if changed is not None and (made := _with_values(earlier.config, changed, overrides)) is not None:
                return made
        made = super().load_sweep_config(master_config, sweep_overrides)
        self._composed = _Composition(master_config, overrides, copy.deepcopy(made))
        return made


def _changed_values(earlier: _Composition, after: Sequence[Override]) -> list[Override] | None:
    """Returns the overrides whose values differ, if these are plain values of knobs and their order does not matter;
    None if the overrides differ in anything else."""
    if len(earlier.overrides) != len(after):
        return None
    pairs = list(zip(earlier.overrides, after, strict=True))
    others = [(old, new) for old, new in pairs if old.input_line != new.input_line]
    has_others = any(_place_of(old) != _place_of(new) for old, new in pairs)
    if has_others or not all(_is_plain(old) and _is_plain(new) for old, new in others):
        return None
    changed, groups = [new for _, new in others], earlier.config.hydra.runtime.choices
    kept = [one.key_or_group for one in after if not (one in changed or one.key_or_group in groups)]
    for place, knob in enumerate(one.key_or_group for one in changed):
        before = [*kept, *(one.key_or_group for one in changed[:place])]
        if any(f"{knob}.".startswith(f"{each}.") or f"{each}.".startswith(f"{knob}.") for each in before):
            return None
    return changed


def _place_of(override: Override) -> tuple[Any, ...]:
    return override.type, override.key_or_group, override.package


def _is_plain(override: Override) -> bool:
    """Returns whether an override sets a number, text or truth value of a knob that is in no list of options."""
    key = override.key_or_group
    is_knob = override.type is OverrideType.CHANGE and "." in key and not key.startswith("hydra.")
    return is_knob and override.package is None and isinstance(override.value(), (int, float, str))


def _with_values(config: DictConfig, changed: Sequence[Override], overrides: Sequence[Override]) -> DictConfig | None:
    """Returns a copy of a point's configuration with other values; None if one is refused."""
    made = copy.deepcopy(config)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(list(changed), made)
    except HydraException:
        return None
    job, ours = made.hydra.job, [one for one in overrides if not one.is_hydra_override()]
    made.hydra.overrides.task = [one.input_line for one in ours]
    job.override_dirname = get_overrides_dirname(ours, **job.config.override_dirname)
    return made


def hydra_over(main_dir: Path, extra_dirs: Sequence[Path], job_name: str) -> Hydra:
    """Returns a Hydra that searches ``main_dir``, ``extra_dirs`` and the schemas; ``GlobalHydra`` is not modified."""
    search_path = create_config_search_path(str(main_dir))
    for extra_dir in extra_dirs:
        # as hydra.main does for --config-dir
        search_path.prepend("command-line", f"file://{extra_dir.absolute()}", SearchPathQuery(provider="schema"))
    return Hydra(task_name=job_name, config_loader=_Loader(config_search_path=search_path))


def repository_of(loader: ConfigLoader) -> IConfigRepository:
    """Returns the files that a Hydra searches."""
    assert isinstance(loader, ConfigLoaderImpl)
    return loader.repository


def add_searchpath(
    loader: ConfigLoader, repo: CachingConfigRepository, config_name: str, overrides: Sequence[Override]
) -> None:
    """Adds the folders of ``hydra.searchpath`` to ``repo``, as Hydra does when it composes."""
    assert isinstance(loader, ConfigLoaderImpl)
    loader._process_config_searchpath(config_name, list(overrides), repo)


def chosen_files(repo: IConfigRepository, config_name: str, choices: list[Override]) -> list[ResultDefault]:
    """Returns the files of a configuration, in merge order."""
    listed = create_defaults_list(repo, config_name, choices, prepend_hydra=True, skip_missing=True)
    return listed.defaults


def load_file(loader: ConfigLoader, repo: IConfigRepository, chosen: ResultDefault) -> Any:
    """Returns the content of a chosen file, at its position in the configuration."""
    assert isinstance(loader, ConfigLoaderImpl)
    return loader._load_single_config(default=chosen, repo=repo).config


def set_value(cfg: DictConfig, parsed: Override) -> None:
    """Sets one value as Hydra does for an override that picks no option."""
    ConfigLoaderImpl._apply_overrides_to_config([parsed], cfg)


def put_empty(repo: CachingConfigRepository, config_path: str) -> ConfigResult:
    """Makes ``repo`` return an empty file from now on."""
    empty = ConfigResult(
        provider="empty",
        path="",
        config=OmegaConf.create(),
        header={"package": None},
        defaults_list=[],
        is_schema_source=True,  # else Hydra looks for a schema of the same name
    )
    repo.cache[f"config_path={config_path}"] = empty
    return empty


def show(hydra: Hydra, args: Namespace, config_name: str) -> None:
    """Prints Hydra's answer to ``--hydra-help``, ``--cfg``, ``--info`` and ``--shell-completion``."""
    if args.hydra_help:
        hydra.hydra_help(config_name=config_name, args_parser=command_line_parser(), args=args)
    elif args.cfg:
        hydra.show_cfg(config_name, args.overrides, cfg_type=args.cfg, package=args.package, resolve=args.resolve)
    elif args.info:
        hydra.show_info(args.info, config_name=config_name, overrides=args.overrides)
    else:
        hydra.shell_completion(config_name=config_name, overrides=args.overrides)
