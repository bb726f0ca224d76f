"""The launcher beside the sweeper: jobs in processes of their own, one a GPU at a time."""

from __future__ import annotations

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore


class WellfedLauncher(BasicLauncher):
    """x"""


ConfigStore.instance().store(
    group="hydra/launcher",
    name="wellfed",
    node={"_target_": f"{__name__}.WellfedLauncher"},
    provider="wellfed",
)
