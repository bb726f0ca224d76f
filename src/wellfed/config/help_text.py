"""The text of ``--help``: the template in ``configs/hydra/default.yaml`` with the options that the files offer."""

from __future__ import annotations

import string
from collections.abc import Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.default_element import GroupDefault
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from wellfed.config.compose import compose_raw
from wellfed.config.knobs import in_order


def help_text(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> str:
    """What ``--help`` prints. Hydra's own does the same in twice the time: it copies all configs for each group.

    The template knows ``$APP_CONFIG_GROUPS``: a line a group, what is chosen marked with ``*``.

    Raises:
        ConfigError: the overrides don't compose.
    """
    cfg = compose_raw(hydra, config_name, overrides)
    HydraConfig.instance().set_config(cfg)
    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert isinstance(choices, dict)
    assert isinstance(hydra.config_loader, ConfigLoaderImpl)
    repo = hydra.config_loader.repository
    primary = repo.load_config(config_name)
    defaults = (primary.defaults_list or []) if primary else []
    groups = [default.group for default in defaults if isinstance(default, GroupDefault) and default.group != "hydra"]
    lines = [
        _line(str(group), in_order(repo.get_group_options(str(group))), choices.get(str(group)))
        for group in groups
        if repo.group_exists(str(group))
    ]
    return string.Template(cfg.hydra.help.template).safe_substitute(APP_CONFIG_GROUPS="\n".join(lines)).rstrip()


def _line(group: str, options: list[str], chosen: str | None) -> str:
    return f"  {group:<12}" + ", ".join(f"{option}*" if option == chosen else option for option in options)
