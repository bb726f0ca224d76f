"""The schemas that the yaml files of ``configs/`` are typed by."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from wellfed.config.schema import EvaluateConfig, RunConfig


def register_schemas() -> None:
    """Make ``run_schema`` and ``evaluate_schema`` known to Hydra; may be called again.

    A primary config lists its schema first in its defaults: all that follows is then typed, files and command line.
    """
    store = ConfigStore.instance()
    for name, schema_type in (("run_schema", RunConfig), ("evaluate_schema", EvaluateConfig)):
        if f"{name}.yaml" not in store.repo:  # storing takes 10 ms, and compose may be called often
            store.store(name=name, node=schema_type, provider="wellfed")
