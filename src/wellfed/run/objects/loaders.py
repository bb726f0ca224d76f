"""Builds the loader of training, and times its first batches before a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets
from wellfed.data.backend_benchmark import build_first_batches, copied
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.data.own_loader import OwnLoader, has_own_batches, loader_of
from wellfed.data.rank_batches import is_read_by_each, shared_out
from wellfed.data.remade_loader import remade, typed_changes
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import TrainLoader, train_loader
from wellfed.plan.run_plan import LoaderSection, RunPlan
from wellfed.ranks import share_of
from wellfed.record.entries import OnEvent, ignore_event
from wellfed.run.objects.run_objects import RunObjects


def loader_settings(config: RunConfig, planned: LoaderSection) -> LoaderSettings:
    """Returns the loader settings of training: planned values and those that are only configured."""
    return replace(
        inline_settings(config),
        backend=planned.backend,
        num_workers=planned.num_workers,
        prefetch_factor=planned.prefetch_factor,
        persistent_workers=planned.persistent_workers,
        pin_memory=planned.pin_memory,
        timeout_s=planned.timeout_s,
    )


def inline_settings(config: RunConfig) -> LoaderSettings:
    """Returns settings that build the same batches in this process."""
    asked = config.loader
    return LoaderSettings(skip_ids=tuple(asked.skip_ids), max_skipped=asked.max_skipped)


def one_off_settings(config: RunConfig, plan: RunPlan) -> LoaderSettings:
    """Returns settings to build a few batches: one worker if the plan has processes or a timeout, else none."""
    asked = loader_settings(config, plan.loader)
    is_watched = asked.num_workers > 0 and (asked.backend != "threads" or asked.timeout_s > 0)
    return _one_worker(asked) if is_watched else inline_settings(config)


def _one_worker(settings: LoaderSettings) -> LoaderSettings:
    return replace(settings, num_workers=1, prefetch_factor=1, persistent_workers=False, pin_memory=False)


def make_train_loader(
    config: RunConfig,
    settings: LoaderSettings,
    data: Datasets,
    *,
    rank: int = 0,
    parts: int = 1,
    batch_size: int | None = None,
    on_event: OnEvent = ignore_event,
) -> TrainLoader | OwnLoader:
    """Returns the loader of one rank's training steps.

    Args:
        parts: batches of a step.
        batch_size: samples for one device, instead of a step's samples.
        on_event: called for samples that fail and are left out.
    """
    trainer, effective = config.trainer, config.workload.samples_per_step // parts
    world_size = 1 if batch_size is not None else trainer.world_size
    limit = trainer.limit_batches if trainer.overfit_batches is None else trainer.overfit_batches
    limit = limit and parts * limit
    if (loader := loader_of(data, "train")) is not None:
        changes = typed_changes(config)
        if batch_size is not None and not has_own_batches(loader):
            changes |= {"batch_size": batch_size}
        elif is_read_by_each(loader):
            changes |= {"batch_size": len(share_of(effective, rank, world_size))}
        own = shared_out(remade(loader, changes), rank, world_size)
        return OwnLoader(own, batch_size=effective, limit_batches=limit, world_size=world_size)
    if limit is not None and batch_size is not None:
        limit *= math.ceil(effective / batch_size)  # keeps the number of samples
    return train_loader(
        data.train,
        settings,
        batch_size=batch_size or effective,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        drop_last=config.workload.drop_last,
        collate=data.collate,
        limit_batches=limit,
        shuffle=trainer.overfit_batches is None,
        on_event=on_event,
    )


def first_builder(config: RunConfig, plan: RunPlan) -> LoaderSettings | None:
    """Returns the settings that build the first batches before training; None where nothing depends on them."""
    names = plan.loader.candidates
    if (plan.loader.num_workers == 0 and len(names) < 2) or plan.loader.backend == "own":
        return None
    # With configured workers, a worker builds the first batch too: a sample may end its process, or hang.
    asked = loader_settings(config, plan.loader)
    return inline_settings(config) if "inline" in names and not asked.timeout_s else _one_worker(asked)


def look_at_first_batches(config: RunConfig, first: LoaderSettings, objects: RunObjects) -> FirstBatches | None:
    """Returns size and build time of a first batch; None if it can't be built."""
    return build_first_batches(trial_loaders(config, objects), first, objects.data.train)


def trial_loaders(
    config: RunConfig, objects: RunObjects, rank: int = 0
) -> Callable[[LoaderSettings], TrainLoader | OwnLoader]:
    """Returns a function that makes a loader of a copy of the training data, by its settings."""
    data = replace(objects.data, train=copied(objects.data.train))
    return lambda settings: make_train_loader(config, settings, data, rank=rank)
