"""A small valid configuration, made without Hydra."""

from collections.abc import Callable
from typing import Any

import pytest

from wellfed.config.schema import RunConfig


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """A configuration without faults, with dotted knobs set: ``make_config({"trainer.devices": 2})``."""

    def make(knobs: dict[str, Any] | None = None) -> RunConfig:
        config = RunConfig()
        config.workload.name = "toy"
        config.workload.effective_batch_size = 64
        config.workload.model = {"_target_": "wellfed.contract.LossOutput", "loss": 1.0}
        config.workload.data = {"_target_": "wellfed.contract.Datasets", "train": []}
        config.trainer.max_epochs = 1
        for dotted, value in (knobs or {}).items():
            *groups, name = dotted.split(".")
            owner: Any = config
            for group in groups:
                owner = getattr(owner, group)
            if isinstance(owner, dict):
                owner[name] = value
            else:
                assert hasattr(owner, name), dotted
                setattr(owner, name, value)
        return config

    return make
