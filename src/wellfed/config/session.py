"""Opens Hydra over our ``configs/`` folder and names the errors it can raise while composing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from wellfed.config.register import register_schemas
from wellfed.errors import ConfigError, Fault

COMPOSE_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,  # gpu=24; also a file that is not UTF-8
    TypeError,  # a yaml key that is not a string
    AssertionError,  # Hydra's own, e.g. a defaults entry with a number for a key
    RecursionError,  # a: ${a}
)
"""What composing raises for faults of the user's."""


def default_config_dir() -> Path:
    """The project's ``configs/``: beside ``src/``, wherever the current directory is."""
    return Path(__file__).resolve().parents[3] / "configs"


def open_hydra(config_dir: Path | None = None, extra_dirs: Sequence[str | Path] = (), job_name: str = "train") -> Hydra:
    """A Hydra over ``config_dir`` (None = the project's) in which ``extra_dirs`` are searched too, ours first.

    Leaves ``GlobalHydra`` alone, so it can be opened inside a multirun and beside another.

    Raises:
        ConfigError: a folder is not there.
    """
    version.setbase("1.3")
    register_schemas()
    main_dir = (config_dir or default_config_dir()).absolute()
    if not main_dir.is_dir():
        raise ConfigError([Fault(str(main_dir), "is no folder of configurations.", "Run from a full clone.")])
    search_path = create_config_search_path(str(main_dir))
    for extra_dir in map(Path, extra_dirs):
        if not extra_dir.is_dir():
            raise ConfigError([Fault(f"--config-dir {extra_dir}", "is no folder.", "Name one that holds yaml files.")])
        # As hydra.main does: behind the main folder, before the schemas.
        search_path.prepend(
            provider="command-line", path=f"file://{extra_dir.absolute()}", anchor=SearchPathQuery(provider="schema")
        )
    return Hydra(task_name=job_name, config_loader=ConfigLoaderImpl(config_search_path=search_path))
