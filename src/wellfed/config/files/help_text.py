"""Writes the text of ``--help``: a template (``configs/hydra/default.yaml``) with the options that the files offer."""

from __future__ import annotations

import re
import string
import textwrap
from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig

from wellfed.command_line import command
from wellfed.config.compose import compose_raw
from wellfed.config.hydra_internals import Hydra, repository_of
from wellfed.config.knobs import in_order

_WIDTH = 120
"""Characters of a line of options."""


def help_text(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> str:
    """Returns the text of ``--help``. Hydra's own takes twice the time: it copies all configs for each group.

    The template knows ``$APP_CONFIG_GROUPS``: a line a group, what is chosen marked with ``*``. Commands are shown as
    this user types them.

    Raises:
        ConfigError: the overrides don't compose.
    """
    cfg = compose_raw(hydra, config_name, overrides)
    HydraConfig.instance().set_config(cfg)
    repo = repository_of(hydra.config_loader)
    lines = []
    for group, chosen in reversed(cfg.hydra.runtime.choices.items()):  # Hydra's last is the first of the primary config
        options = [f"{option}*" if option == chosen else option for option in in_order(repo.get_group_options(group))]
        if options and not group.startswith("hydra"):
            begin = f"  {group:<12}"
            lines += textwrap.wrap(", ".join(options), _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin))
    text = string.Template(cfg.hydra.help.template).safe_substitute(APP_CONFIG_GROUPS="\n".join(lines)).rstrip()
    text = re.sub(r"\bpython src/(\w+)\.py\b", lambda found: command(found[1]), text)
    return re.sub(r"\bpython -m wellfed (\w+)", lambda found: command(found[1]), text)
