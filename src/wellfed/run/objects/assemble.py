"""Builds the objects of a run in order: data, model, features, callbacks.

Here alone it is decided whether Lightning's own Trainer trains a run (a guest); other files take that as a fact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from wellfed.config.build import build
from wellfed.config.schema import RunConfig, Strategy
from wellfed.contract import Datasets
from wellfed.errors import ConfigError
from wellfed.run.objects.datasets import is_of_lightning, prepared_data, read_data, with_derived, with_loader
from wellfed.run.objects.evaluation import make_metrics
from wellfed.run.objects.guests import check_arguments, loaders_of, with_step_size, without_loaders
from wellfed.run.objects.models import check_model, features_of, gives_sparse_gradients, use_own_modes
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.objects.user_callbacks import make_callbacks

if TYPE_CHECKING:
    from wellfed.train.guest.data import GuestLoaders


def make_objects(config: RunConfig) -> RunObjects:
    """Reads the data and builds the model, on the CPU.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    workload, given, owner = config.workload, None, None
    if workload.data is not None:
        given, owner = read_data(config)
        config, given = with_derived(config, given)
    model = build(config.workload.model, "workload.model", **({} if given is None else given.model_args))
    is_module = is_of_lightning(model, "LightningModule")
    if given is None and not is_module:
        target = workload.model.get("_target_")
        problem = f"is null, and {target} is no LightningModule with a train_dataloader of its own."
        raise ConfigError.of("workload.data", problem, "Set workload.data._target_=<package>.<module>.<name>.")
    owner = model if given is None else owner
    objects = RunObjects(
        Datasets(None) if given is None else given,
        model,
        None,
        brings_step=is_module,
        has_sparse_gradients=gives_sparse_gradients(model),
        given=None if owner is not None else given,
    )
    if not is_module:
        _check_plain_model(config, model)
    if owner is not None or is_module:
        return as_guest(config, objects, loaders_of(config, owner, given))
    data = prepared_data(objects.data, model, config.workload.effective_batch_size)
    return replace(objects, data=data, features=features_of(data, model))


def as_guest(config: RunConfig, objects: RunObjects, loaders: GuestLoaders) -> RunObjects:
    """Returns the objects with data for Lightning, whose loaders it reads as they came."""
    data, model = without_loaders(objects.given, loaders), objects.model
    data = prepared_data(data, model, config.workload.effective_batch_size)
    features = None if objects.brings_step else features_of(data, model)
    return replace(objects, data=data, features=features, guest=loaders)


def _why_guest(config: RunConfig, objects: RunObjects) -> str:
    """Returns why a run trains under Lightning's own Trainer; empty for a plain model, which the engine's loop trains.

    Does not import Lightning.
    """
    if objects.brings_step:
        return f"{type(objects.model).__name__} is a LightningModule"
    if objects.guest is not None and objects.guest.owner is not None:
        return f"{type(objects.guest.owner).__name__} is a LightningDataModule"
    for name, callback in objects.callbacks.items():
        if is_of_lightning(callback, "Callback"):
            return f"callbacks.{name} is a callback of Lightning"
    return "trainer.strategy=fsdp shards it" if config.trainer.strategy is Strategy.fsdp else ""


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
    objects = replace(objects, why_guest=_why_guest(config, objects))
    check_arguments(config, objects)
    if objects.why_guest and objects.guest is None:  # a callback of Lightning, or shards, come with a plain model
        objects = as_guest(config, objects, loaders_of(config, None, objects.given))
    if objects.why_guest and not objects.brings_step:
        note = f"{objects.why_guest}, so Lightning's own Trainer trains the model."
        objects = replace(objects, data=replace(objects.data, notes=(*objects.data.notes, note)))
    if objects.guest is not None and objects.guest.has("train"):
        guest = replace(objects.guest, step_samples=config.workload.effective_batch_size)
        return with_step_size(config, guest), replace(objects, guest=guest)
    return with_loader(config, objects.data), objects


def check_around(config: RunConfig, objects: RunObjects) -> None:
    """Raises a ConfigError if metrics don't go with the model, before anything is planned."""
    workload = config.workload
    if not objects.brings_step:
        make_metrics(config)
    elif workload.metrics is not None:
        problem = f"{workload.model.get('_target_')} is a LightningModule, which logs its own metrics."
        raise ConfigError.of("workload.metrics", problem, "Set workload.metrics=null, and log them in its steps.")


def _check_plain_model(config: RunConfig, model: nn.Module) -> None:
    """Raises a ConfigError if nothing trains the model."""
    workload = config.workload
    check_model(model, workload.model.get("_target_"))
    use_own_modes(model)
    if workload.optimizer is None:
        problem = "null leaves nothing to train with; only a LightningModule brings its own."
        raise ConfigError.of("workload.optimizer", problem, "Set workload.optimizer._target_=torch.optim.AdamW.")
