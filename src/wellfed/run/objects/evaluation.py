"""Builds what evaluates a split: its loader, and the metrics that the configuration names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wellfed.config.build import build
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.own_loader import BareStream, OwnEvalLoader, loader_of
from wellfed.data.remade_loader import remade, typed_changes
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import check_items
from wellfed.errors import ConfigError, DataError
from wellfed.plan.run_plan import RunPlan
from wellfed.run.objects.datasets import of_split
from wellfed.run.objects.loaders import loader_settings
from wellfed.run.objects.run_objects import RunObjects
from wellfed.units import counted


def make_metrics(config: RunConfig) -> Any:
    """Returns the configured metrics of torchmetrics; None without any."""
    node = config.workload.metrics
    if node is None:
        return None
    from torchmetrics import MetricCollection

    found = build(node, "workload.metrics")
    if isinstance(found, MetricCollection):
        return found
    try:
        return MetricCollection(found)
    except (ValueError, TypeError) as error:
        problem = f"can't be collected: {error}"
        way_out = "Name classes of torchmetrics: one, a list of them, or a mapping {accuracy: {_target_: ...}}."
        raise ConfigError.of("workload.metrics", problem, way_out) from error


def named_best(config: RunConfig, objects: RunObjects) -> str | None:
    """Returns ``trainer.best_metric`` as in metrics.csv: ``acc`` for the ``val/acc`` that a LightningModule logs."""
    name = config.trainer.best_metric
    return name and name.removeprefix("val/").removeprefix("val_") if objects.brings_step else name


def searched_metric(config: RunConfig, objects: RunObjects) -> tuple[str, Any]:
    """Returns name and direction of the metric that picks the best checkpoint, before training is set up."""
    name, mode = named_best(config, objects), config.trainer.best_mode
    own: tuple[str, Any] = ("loss", "min")
    if not objects.brings_step:
        from wellfed.train.plain_model.split_metrics import SplitMetrics

        evaluation = SplitMetrics(objects.model, objects.data.evaluation, make_metrics(config))
        own = evaluation.best_metric, evaluation.best_mode
    return name or own[0], own[1] if mode is None else mode.value


def make_eval_loader(
    config: RunConfig,
    plan: RunPlan,
    data: Datasets,
    split: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    few: int | None = None,
) -> EvalLoader | OwnEvalLoader:
    """Returns one pass over ``val`` or ``test``, in micro-batches, or in the batches of its DataLoader.

    Args:
        rank: rank among ``world_size`` that share the batches; 0 of 1 where each has all.
        few: limit on the number of batches, in addition to the configured one.

    Raises:
        DataError: the split has no samples, or can't be sent to worker processes.
    """
    dataset = getattr(data, split)
    limit = min((each for each in (config.trainer.limit_batches, few) if each is not None), default=None)
    size = config.workload.eval_batch_size or of_split(data.eval_batch_size, split) or plan.memory.micro_batch
    if (own := loader_of(data, split)) is not None:
        changes = typed_changes(config, split)
        if isinstance(own, BareStream):
            changes["batch_size"] = size
        made: EvalLoader | OwnEvalLoader = OwnEvalLoader(
            remade(own, changes, split), batch_size=size, limit_batches=limit
        )
    else:
        check_items(dataset, by_item=False)
        made = EvalLoader(
            dataset,
            size,
            seed=config.seed,
            settings=eval_settings(config, plan, dataset),
            rank=rank,
            world_size=world_size,
            collate=of_split(data.eval_collate, split) or data.collate,
            limit_batches=limit,
        )
    if len(made) == 0:
        name, way_out = type(dataset).__name__, f"Check workload.data, or leave {split} out of Datasets."
        raise DataError(f"{name} makes no {split} batch of its {counted(len(dataset), 'sample')}. {way_out}")
    return made


def eval_settings(config: RunConfig, plan: RunPlan, dataset: Any) -> LoaderSettings:
    """Returns the settings of training that an evaluation can have too."""
    asked = loader_settings(config, plan.loader)
    if asked.num_workers == 0 or plan.loader.backend == "own":  # its numbers are those of another DataLoader
        return LoaderSettings(pin_memory=asked.pin_memory)
    if asked.backend == "threads" and not callable(getattr(dataset, "fetch", None)):
        return replace(asked, backend="processes")  # its samples may draw from the process's generators
    return asked


def eval_device_prefetch(plan: RunPlan, data: Datasets, split: str) -> int:
    """Returns the number of evaluation batches that are copied to the device ahead. Without workers the copying thread
    would build the batches too, and draw from the process's generators."""
    if loader_of(data, split) is not None:
        return 0
    has_workers = plan.loader.num_workers > 0 and plan.loader.backend != "own"
    may_build_ahead = has_workers or callable(getattr(getattr(data, split), "fetch", None))
    return plan.loader.device_prefetch if may_build_ahead else 0
