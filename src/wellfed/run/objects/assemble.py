"""Builds the objects of a run in order: data, model, features, callbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from wellfed.config.build import build
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.run.objects.datasets import (
    data_of_module,
    is_lightning_module,
    prepared_data,
    read_data,
    with_derived,
    with_loader,
)
from wellfed.run.objects.evaluation import make_metrics
from wellfed.run.objects.models import check_model, features_of, gives_sparse_gradients, use_own_modes
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.objects.user_callbacks import make_callbacks


def make_objects(config: RunConfig) -> RunObjects:
    """Reads the data and builds the model, on the CPU.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    workload, data_module = config.workload, None
    if workload.data is None:
        model = build(workload.model, "workload.model")
        data = data_of_module(model, workload.model.get("_target_"))
    else:
        data, data_module = read_data(config)
        config, data = with_derived(config, data)
        model = build(config.workload.model, "workload.model", **data.model_args)
    data = prepared_data(data, model, config.workload.effective_batch_size)
    if is_lightning_module(model):
        if data_module is not None:
            from wellfed.train.lightning.user_module.data_module import use_hooks

            use_hooks(model, data_module)
        features = None
    else:
        _check_plain_model(config, model, data_module)
        features = features_of(data, model)
    return RunObjects(
        data,
        model,
        features,
        is_lightning_module=is_lightning_module(model),
        has_sparse_gradients=gives_sparse_gradients(model),
        data_module=data_module,
    )


def complete(config: RunConfig, objects: RunObjects | None) -> tuple[RunConfig, RunObjects]:
    """Builds missing objects, and returns the configuration with values derived from the data.

    Metrics and optimizer are checked here, since points of a study with other ones share data and model.

    Args:
        objects: data and model, if they exist already; None = make them.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    objects = make_objects(config) if objects is None else objects
    config, data = with_derived(config, objects.data)
    check_around(config, objects)
    objects = replace(objects, data=data, callbacks=make_callbacks(config, objects))
    return with_loader(config, objects.data), objects


def check_around(config: RunConfig, objects: RunObjects) -> None:
    """Raises a ConfigError if metrics don't go with the model, before anything is planned."""
    workload = config.workload
    if not objects.is_lightning_module:
        make_metrics(config)
    elif workload.metrics is not None:
        problem = f"{workload.model.get('_target_')} is a LightningModule, which logs its own metrics."
        raise ConfigError.of("workload.metrics", problem, "Set workload.metrics=null, and log them in its steps.")


def _check_plain_model(config: RunConfig, model: nn.Module, data_module: Any) -> None:
    """Raises a ConfigError if model and data module don't go together, or nothing trains the model."""
    workload = config.workload
    check_model(model, workload.model.get("_target_"))
    use_own_modes(model)
    if workload.optimizer is None:
        problem = "null leaves nothing to train with; only a LightningModule brings its own."
        raise ConfigError.of("workload.optimizer", problem, "Set workload.optimizer._target_=torch.optim.AdamW.")
    if data_module is not None:
        from wellfed.train.lightning.user_module.data_module import transfer_hooks

        if hooks := transfer_hooks(data_module):
            problem = (
                f"{type(data_module).__name__}.{hooks[0]} is for a LightningModule, and the model is a plain nn.Module."
            )
            way_out = "Do it in the data set's on_device(batch, rng), or in the model's loss."
            raise ConfigError.of("workload.data", problem, way_out)
