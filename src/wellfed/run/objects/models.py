"""Checks the model of a run, returns the facts of it that the plan uses, and prepares it for steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets, Features
from wellfed.errors import ConfigError
from wellfed.extras import other_lightning
from wellfed.plan.run_plan import ModelFacts, RunPlan
from wellfed.run.objects.optimizers import states_per_parameter
from wellfed.train.memory.checkpointing import blocks, checkpoint_blocks
from wellfed.train.memory.features import of_data
from wellfed.train.memory.step_start import bytes_of
from wellfed.train.step.precision import set_backend_flags

if TYPE_CHECKING:
    from wellfed.run.objects.run_objects import RunObjects


def check_model(model: Any, target: str) -> None:
    """Raises a ConfigError if this is not a plain model that can be trained."""
    if found := other_lightning(type(model), "LightningModule"):
        raise ConfigError.of("workload.model", *found)
    if not isinstance(model, nn.Module):
        problem, way_out = f"is a {type(model).__name__}, not an nn.Module.", "Name an nn.Module."
    elif not callable(getattr(model, "loss", None)):
        problem, way_out = "has no loss(batch).", "Add: def loss(self, batch) -> wellfed.LossOutput."
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        problem, way_out = "has no trainable parameter.", "Unfreeze some."
    else:
        return
    raise ConfigError.of("workload.model", f"{target} {problem}", way_out)


def use_own_modes(model: nn.Module) -> None:
    """Calls ``train`` of parts that have their own, as to keep a frozen encoder in eval mode: Lightning does not."""
    for part in list(model.modules()):
        if type(part).train is not nn.Module.train:
            part.train(part.training)


def features_of(data: Datasets, model: nn.Module) -> Features | None:
    """Returns the features of the model, or of the data."""
    offered = getattr(model, "features", None)
    features: Features | None = offered() if callable(offered) else None
    if data.features is None:
        return features
    if features is not None:
        problem = "offers features, and so does the data; a step has one source of them."
        raise ConfigError.of("workload.model", problem, "Leave out features() or Datasets.features.")
    return of_data(data.features)


def gives_sparse_gradients(model: nn.Module) -> bool:
    """Returns whether a weight of the model gets sparse gradients."""
    sparse = [module for module in model.modules() if getattr(module, "sparse", False) is True]
    return any(weight.requires_grad for module in sparse for weight in module.parameters(False))


def model_facts(objects: RunObjects, config: RunConfig) -> ModelFacts:
    """Returns the facts of the model that the plan uses."""
    model, optimizer = objects.model, config.workload.optimizer

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(bytes_of(tensor) for tensor in tensors if not is_lazy(tensor))

    trainable_bytes = size(weight for weight in model.parameters() if weight.requires_grad)
    return ModelFacts(
        parameter_bytes=size(chain(model.parameters(), model.buffers())),
        trainable_bytes=trainable_bytes,
        optimizer_state_bytes=0 if optimizer is None else states_per_parameter(optimizer) * trainable_bytes,
        has_batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
        whole_steps=objects.guest is not None,
        brings_step=objects.brings_step,
        steps_by_hand=objects.brings_step and not model.automatic_optimization,
        has_sparse_gradients=objects.has_sparse_gradients,
        has_blocks=next(blocks(model), None) is not None,
        average_bytes=_average_bytes(objects),
    )


def prepare_step(config: RunConfig, plan: RunPlan, model: nn.Module) -> None:
    """Sets backend flags, and memory format and checkpointing of the model before it reaches its device: the same for
    training and for the steps that are tried before."""
    set_backend_flags(tf32=plan.device.tf32, cudnn_benchmark=config.gpu.cudnn_benchmark, on_gpu=plan.on_gpu)
    if config.gpu.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plan.memory.checkpoint_activations:
        checkpoint_blocks(model)


def _average_bytes(objects: RunObjects) -> int:
    """Returns the bytes of the averaged weights that callbacks keep beside the model."""
    if not objects.callbacks:
        return 0
    copies = sum(map(_is_average_beside_model, objects.callbacks.values()))
    return copies * sum(map(bytes_of, chain(objects.model.parameters(), objects.model.buffers())))


def _is_average_beside_model(callback: Any) -> bool:
    from wellfed.train.loop.callbacks import Callback, Ema

    if isinstance(callback, Callback):
        return isinstance(callback, Ema)
    from wellfed.train.guest.users import is_average_beside_model

    return is_average_beside_model(callback)
