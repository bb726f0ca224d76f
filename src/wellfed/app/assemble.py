"""From configuration to objects: data, model, features, loaders, and what the plan needs to know of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wellfed.config.build import build
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets, Features
from wellfed.errors import ConfigError, DataError, Fault
from wellfed.lit import trainer as lit
from wellfed.loading.backends import LoaderPlan
from wellfed.loading.build import EvalLoader, IterableLoader, TrainLoader, train_loader
from wellfed.planning.planned import DataFacts, ModelFacts, RunPlan


@dataclass(frozen=True)
class Parts:
    """What the configuration names, made."""

    data: Datasets
    model: nn.Module
    features: Features | None
    is_lightning_module: bool = False


def make_parts(config: RunConfig) -> Parts:
    """Read the data and build the model, on the CPU.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    workload = config.workload
    data = build(workload.data, "workload.data")
    if not isinstance(data, Datasets):
        target = workload.data.get("_target_")
        raise ConfigError(
            [
                Fault(
                    "workload.data",
                    f"{target} returned {type(data).__name__}, and a workload's data is a wellfed.contract.Datasets.",
                    "Return Datasets(train, val, test).",
                )
            ]
        )
    model = build(workload.model, "workload.model", **data.model_args)
    if lit.is_lightning_module(model):
        return Parts(data, model, None, is_lightning_module=True)
    _check_model(model, workload.model.get("_target_"))
    if workload.optimizer is None:
        raise ConfigError(
            [
                Fault(
                    "workload.optimizer",
                    "null leaves nothing to train with; only a LightningModule brings its own.",
                    "Set workload.optimizer._target_=torch.optim.AdamW.",
                )
            ]
        )
    offered = getattr(model, "features", None)
    features = offered() if callable(offered) else None
    return Parts(data, model, features)


def _check_model(model: Any, target: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            [Fault("workload.model", f"{target} is a {type(model).__name__}, not an nn.Module.", "Name an nn.Module.")]
        )
    if not callable(getattr(model, "loss", None)):
        raise ConfigError(
            [
                Fault(
                    "workload.model",
                    f"{target} has no loss(batch).",
                    "Add: def loss(self, batch) -> LossOutput (docs/workloads.md).",
                )
            ]
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError([Fault("workload.model", f"{target} has no trainable parameter.", "Unfreeze some.")])


def data_facts(parts: Parts) -> DataFacts:
    """What the plan needs to know of the data."""
    train = parts.data.train
    is_iterable = not hasattr(train, "__getitem__")
    return DataFacts(
        num_train=len(train) if hasattr(train, "__len__") else 0,
        has_fetch=callable(getattr(train, "fetch", None)),
        is_iterable=is_iterable,
        feature_rows=parts.features.num_rows if parts.features else 0,
        feature_bytes=parts.features.bytes if parts.features else 0,
        features_trainable=parts.features.trainable if parts.features else False,
    )


def model_facts(parts: Parts, config: RunConfig) -> ModelFacts:
    """What the plan needs to know of the model."""
    trainable = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    batch_norm = (nn.modules.batchnorm._BatchNorm,)
    return ModelFacts(
        parameter_bytes=sum(p.numel() * p.element_size() for p in parts.model.parameters())
        + sum(b.numel() * b.element_size() for b in parts.model.buffers()),
        trainable_bytes=sum(p.numel() * p.element_size() for p in trainable),
        optimizer_state_bytes=0
        if config.workload.optimizer is None
        else _states_per_parameter(config.workload.optimizer) * sum(p.numel() * p.element_size() for p in trainable),
        has_batch_norm=any(isinstance(module, batch_norm) for module in parts.model.modules()),
        is_lightning_module=parts.is_lightning_module,
    )


def _states_per_parameter(optimizer: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size the optimizer keeps for it; found by one step on a tiny one."""
    probe = nn.Parameter(torch.zeros(2, 3))
    probe.grad = torch.zeros(2, 3)
    made = build(optimizer, "workload.optimizer", [probe])
    if "closure" in inspect.signature(made.step).parameters and type(made).__name__ == "LBFGS":
        return 2 * int(made.defaults["history_size"])
    made.step()
    return sum(value.shape == probe.shape for value in made.state[probe].values() if isinstance(value, torch.Tensor))


def make_optimizer(config: RunConfig, plan: RunPlan, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The workload's optimizer; fused where torch offers it and nothing forbids it."""
    node = dict(config.workload.optimizer)
    made: torch.optim.Optimizer = build(node, "workload.optimizer", [dict(group) for group in groups])
    if "fused" not in made.defaults or "fused" in node or node.get("foreach") or node.get("capturable"):
        return made
    # Lightning refuses a fused optimizer where it must unscale gradients itself to clip them.
    if plan["gpu.precision"] == "16-mixed" and config.trainer.gradient_clip is not None:
        return made
    try:
        return build({**node, "fused": True}, "workload.optimizer", [dict(group) for group in groups])  # type: ignore[no-any-return]
    except (ConfigError, RuntimeError):  # not for this dtype or device
        return made


def make_train_loader(
    config: RunConfig, plan: RunPlan, data: Datasets, *, rank: int = 0
) -> TrainLoader | IterableLoader:
    """The steps of training for one rank."""
    overfit = config.trainer.overfit_batches
    return train_loader(
        data.train,
        batch_size=config.workload.effective_batch_size,
        seed=config.seed,
        plan=LoaderPlan(
            backend=plan["loader.backend"],
            num_workers=plan["loader.num_workers"],
            prefetch_factor=plan["loader.prefetch_factor"],
            persistent_workers=plan["loader.persistent_workers"],
            pin_memory=plan["loader.pin_memory"],
            timeout_s=plan["loader.timeout_s"],
            worker_threads=plan["loader.worker_threads"],
        ),
        rank=rank,
        world_size=config.trainer.devices,
        drop_last=config.workload.drop_last,
        collate=data.collate,
        skip_ids=tuple(config.loader.skip_ids),
        limit_batches=overfit if overfit is not None else config.trainer.limit_batches,
        shuffle=overfit is None,
    )


def make_eval_loader(config: RunConfig, plan: RunPlan, data: Datasets, split: str) -> EvalLoader | None:
    """A pass over ``val`` or ``test`` in micro-batches; None if the workload has no such split."""
    dataset = getattr(data, split)
    if dataset is None:
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"The {split} data ({type(dataset).__name__}) must be map-style: __len__ and __getitem__.")
    return EvalLoader(
        dataset,
        plan["memory.micro_batch"],
        seed=config.seed,
        collate=data.collate,
        limit_batches=config.trainer.limit_batches,
    )
