"""Wraps all uses of ``hydra._internal``, which a new version of Hydra may break.

``tests/config/test_hydra_internals.py`` runs this file on the lowest and the highest allowed version.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _locate as locate
from hydra._internal.utils import create_config_search_path
from hydra._internal.utils import get_args_parser as command_line_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""Class of Hydra's own sweeper, which runs points unranked."""
__all__ = ["BASIC_SWEEPER", "Hydra", "IConfigRepository", "command_line_parser", "locate"]


def hydra_over(main_dir: Path, extra_dirs: Sequence[Path], job_name: str) -> Hydra:
    """Returns a Hydra that searches ``main_dir``, ``extra_dirs`` and the schemas; ``GlobalHydra`` is not modified."""
    search_path = create_config_search_path(str(main_dir))
    for extra_dir in extra_dirs:
        # as hydra.main does for --config-dir
        search_path.prepend("command-line", f"file://{extra_dir.absolute()}", SearchPathQuery(provider="schema"))
    return Hydra(task_name=job_name, config_loader=ConfigLoaderImpl(config_search_path=search_path))


def searched_files(loader: ConfigLoader, config_name: str, overrides: Sequence[Override]) -> IConfigRepository:
    """Returns the files that a Hydra searches, with ``hydra.searchpath``; raises Hydra's error about that."""
    assert isinstance(loader, ConfigLoaderImpl)
    repo = CachingConfigRepository(loader.repository)
    loader._process_config_searchpath(config_name, list(overrides), repo)
    return repo


def set_value(cfg: DictConfig, parsed: Override) -> None:
    """Sets one value as Hydra does for an override that picks no option."""
    ConfigLoaderImpl._apply_overrides_to_config([parsed], cfg)


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
