"""Makes the loaders and the module of a guest, which Lightning's own Trainer trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets
from wellfed.data.own_loader import step_size
from wellfed.errors import ConfigError
from wellfed.plan.run_plan import DataFacts, RunPlan
from wellfed.record.entries import OnEvent
from wellfed.run.objects.datasets import facts_of, planned_size

if TYPE_CHECKING:
    from wellfed.run.objects.run_objects import RunObjects
    from wellfed.train.guest.data import GuestLoaders

SPLITS = ("train", "val", "test")


def check_arguments(config: RunConfig, objects: RunObjects) -> None:
    """Raises a ConfigError if ``trainer.lightning`` has impossible arguments, or there is no Trainer of Lightning."""
    if not config.trainer.lightning:
        return
    if not objects.why_guest:
        problem = f"is for Lightning's Trainer, and {type(objects.model).__name__} is trained by the engine's own loop."
        raise ConfigError.of("trainer.lightning", problem, "Leave it out, or bring a LightningModule.")
    from wellfed.train.guest.arguments import argument_faults

    if faults := list(argument_faults(config)):
        raise ConfigError(faults)


class ReadByLightning:
    """Placeholder in `Datasets` for a split that Lightning reads from the user's loaders."""

    def __init__(self, loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        dataset = getattr(self.loaders, "dataset", ())
        return len(dataset) if hasattr(dataset, "__len__") else 0


def loaders_of(config: RunConfig, owner: Any, data: Datasets | None) -> GuestLoaders:
    """Returns the user's loaders: of a LightningDataModule or LightningModule, or those in the data.

    An IterableDataset gets the DataLoader that one would give it under Lightning.

    Args:
        owner: None if the data have all splits.

    Raises:
        ConfigError: the samples of a step are needed for an IterableDataset.
    """
    from wellfed.train.guest.data import GuestLoaders, looked_at

    if owner is not None:
        return looked_at(owner, config.trainer.devices, config.trainer.num_nodes)
    given, size = {split: getattr(data, split) for split in SPLITS}, config.workload.effective_batch_size
    for split, one in given.items():
        if isinstance(one, IterableDataset):
            if size is None:
                problem = f"is null, and {type(one).__name__} comes without a DataLoader: how many samples has a step?"
                raise ConfigError.of("workload.effective_batch_size", problem, "Set workload.effective_batch_size=32.")
            given[split] = DataLoader(one, size, collate_fn=getattr(data, "collate", None))
    return GuestLoaders(given={split: one for split, one in given.items() if _is_loader(one)})


def _is_loader(value: Any) -> bool:
    """Returns whether a split is read as it is: one loader or several, or another iterable that is no dataset."""
    if isinstance(value, DataLoader):
        return True
    if isinstance(value, (list, tuple, Mapping)):
        parts = list(value.values() if isinstance(value, Mapping) else value)
        return bool(parts) and all(map(_is_loader, parts))
    return hasattr(value, "__iter__") and not hasattr(value, "__getitem__")


def without_loaders(data: Datasets | None, loaders: GuestLoaders) -> Datasets:
    """Returns the data with a placeholder for each split that the loaders give."""
    given = Datasets(None) if data is None else data
    found: dict[str, Any] = {split: ReadByLightning(loaders.given.get(split)) for split in SPLITS if loaders.has(split)}
    unknown = [f"The loaders are unknown before training: {loaders.unknown}."] if loaders.unknown else []
    return replace(given, **found, notes=(*given.notes, *unknown))


def data_facts(objects: RunObjects, loaders: GuestLoaders, config: RunConfig) -> DataFacts:
    """Returns the facts of the user's loaders that the plan uses.

    Raises:
        ConfigError: a loader can't be as it is configured.
    """
    changes, one = loaders.changes(config, "train"), loaders.first
    for split, given in loaders.given.items():
        loaders.changed(config, split, given)
    facts = facts_of(one, changes if one is not None else {})
    has_length = objects.brings_step or facts.has_length
    own = replace(facts, name=loaders.name, batch_size=step_size(loaders.first), has_length=has_length)
    num_train = 0 if loaders.unknown else len(objects.data.train)
    return DataFacts(num_train=num_train, has_fetch=False, derived=objects.data.derived, own_loader=own)


def with_step_size(config: RunConfig, loaders: GuestLoaders) -> RunConfig:
    """Fills in the samples of a step from the user's loaders: those of all ranks, as under Lightning; 0 = unknown.

    Raises:
        ConfigError: other samples were typed, and the loaders can't be made again with them.
    """
    workload, world = config.workload, config.trainer.world_size
    asked = workload.effective_batch_size
    if asked is None:
        size = (planned_size(loaders.first) or 0) * world
        return replace(config, workload=replace(workload, effective_batch_size=size))
    if loaders.first is None and not loaders.unknown:
        problem = "can't change loaders that are no single DataLoader."
        raise ConfigError.of(f"workload.effective_batch_size={asked}", problem, "Set it to null.")
    if asked % world:
        problem = f"is no multiple of {config.trainer.ranks}, and each rank's loader has equally many."
        raise ConfigError.of(f"workload.effective_batch_size={asked}", problem, "Set a multiple, or null.")
    return config


def batches_per_epoch(config: RunConfig, loader: Any) -> int | None:
    """Returns the batches of an epoch on each rank under Lightning's Trainer; None if unknown before.

    Args:
        loader: of training: the user's or the engine's.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    trainer, given = config.trainer, config.trainer.lightning or {}
    if isinstance(loader, DataLoader):  # Lightning shares out what no DistributedSampler does
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if given.get("use_distributed_sampler", True) and not isinstance(sampler, DistributedSampler):
            length = math.ceil(length / trainer.world_size)
    limits = trainer.limit_batches, given.get("limit_train_batches"), given.get("overfit_batches")
    for limit in (one for one in limits if one and isinstance(one, (int, float))):  # Lightning refuses others
        length = int(length * limit) if isinstance(limit, float) else min(length, limit)
    return length


def wrapped(config: RunConfig, objects: RunObjects, plan: RunPlan, total_steps: int | None, on_event: OnEvent) -> Any:
    """Returns the module that Lightning trains: the user's LightningModule, or one around a plain model.

    Args:
        total_steps: steps of the learning-rate schedule; None = unknown.
    """
    if objects.brings_step:
        return objects.model
    from wellfed.run.objects.evaluation import make_metrics
    from wellfed.run.objects.optimizers import make_optimizer, make_scheduling
    from wellfed.train.guest.module import PlainModule
    from wellfed.train.memory.features import FeatureTable
    from wellfed.train.plain_model.scheduling import Schedule
    from wellfed.train.plain_model.split_metrics import SplitMetrics
    from wellfed.train.step.micro_batches import Preparation
    from wellfed.train.step.train_step import parameter_groups

    data, model, schedule = objects.data, objects.model, config.workload.schedule

    def optimizers() -> dict[str, Any]:
        groups, sparse = parameter_groups(model), objects.has_sparse_gradients
        optimizer = make_optimizer(config, plan, groups, sparse=sparse, has_listeners=True)
        scheduling = make_scheduling(config)
        if scheduling is not None:
            return {"optimizer": optimizer, "lr_scheduler": scheduling.of(optimizer)}
        factor = Schedule(schedule.name.value, schedule.warmup_steps, schedule.min_lr_frac, total_steps)
        # A lambda is not saved: a resumed run with more steps would get the old end of its schedule.
        scheduler = LambdaLR(optimizer, lambda step: factor(step))  # noqa: PLW0108
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def dataset_of(split: str) -> Any:
        found = getattr(data, split)
        return getattr(found.loaders, "dataset", None) if isinstance(found, ReadByLightning) else found

    prepare = {split: Preparation(dataset_of(split), config.seed, model) for split in SPLITS}
    metrics, mode = SplitMetrics(model, data.evaluation, make_metrics(config)), plan.memory.features or "dynamic"
    features = None if objects.features is None else FeatureTable(objects.features, mode, may_change=False)
    return PlainModule(model, prepare, metrics, optimizers, features, on_event)
