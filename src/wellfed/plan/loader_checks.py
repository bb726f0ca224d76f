"""Finds faults and warnings in the settings of the loader, once ``loader.*`` is decided."""

from __future__ import annotations

from collections.abc import Iterator

from wellfed.config.schema import Backend, RunConfig, ScheduleName
from wellfed.errors import Fault
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.run_plan import DataFacts, LoaderSection, OwnLoader

_NEED_WORKERS = ("prefetch_factor", "persistent_workers", "timeout_s", "device_prefetch")
"""Knobs of ``loader`` that have no effect on a DataLoader without workers."""
_LISTED = 5
"""Maximum number of samples named in a warning."""


def loader_faults(config: RunConfig, data: DataFacts, section: LoaderSection) -> Iterator[Fault]:
    """Yields faults of settings of the loader that are impossible."""
    asked, trainer = config.loader, config.trainer
    if data.own_loader is not None:
        yield from _own_faults(config, data.own_loader)
        return
    if asked.backend is Backend.own:
        problem = "leaves a DataLoader as it came, and workload.data gives none for training."
        yield Fault("loader.backend=own", problem, "Set loader=auto, or let workload.data return DataLoaders.")
    if section.backend == "threads" and not data.has_fetch:
        problem = "threads needs training data with fetch(indices, rng), and these have none."
        yield Fault("loader.backend", problem, "Set loader.backend=processes, or give the dataset fetch.")
    if asked.max_skipped and trainer.world_size > 1:
        yield Fault(
            "loader.max_skipped",
            f"{asked.max_skipped} with {trainer.ranks}: a rank does not know that another left out a "
            "sample of the step.",
            "Set loader.max_skipped=0 and loader.skip_ids=[...], or one device.",
        )


def _own_faults(config: RunConfig, own: OwnLoader) -> Iterator[Fault]:
    """Yields faults of settings that a loader of the user's own can't have."""
    asked, has_workers = config.loader, own.values["num_workers"] > 0
    instead = "or hand over the dataset instead of its loader: Datasets(dataset, ...)."
    builds_itself = f"{own.name} builds its batches itself, and is used as it came"
    if asked.backend is Backend.threads:
        yield Fault("loader.backend=threads", f"{builds_itself}.", f"Set loader.backend=auto, {instead}")
    if asked.backend is Backend.processes and not has_workers:
        problem = "asks for worker processes, and the DataLoader has num_workers=0."
        yield Fault("loader.backend=processes", problem, "Set loader.num_workers=2.")
    for knob, value, left_out in (("skip_ids", list(asked.skip_ids), "[]"), ("max_skipped", asked.max_skipped, "0")):
        if value:
            where = f"loader.{knob}={str(value).replace(' ', '')}"
            yield Fault(where, f"{builds_itself}.", f"Set loader.{knob}={left_out}, {instead}")
    if config.trainer.overfit_batches is not None:
        problem = f"the next epoch of {own.name} may have other batches."
        yield Fault(f"trainer.overfit_batches={config.trainer.overfit_batches}", problem, f"Set it to null, {instead}")
    schedule = config.workload.schedule.name
    if schedule is not ScheduleName.constant and config.trainer.max_steps is None and not own.has_length:
        problem = f"needs the number of the last step, and {own.name} has no __len__ to tell it."
        yield Fault(f"workload.schedule.name={schedule}", problem, "Set trainer.max_steps=1000, or give it __len__.")


def loader_warnings(
    config: RunConfig, facts: MachineFacts, data: DataFacts, section: LoaderSection, *, on_gpu: bool
) -> Iterator[str]:
    """Yields warnings about settings of the loader that are ignored."""
    asked, devices = config.loader, config.trainer.devices
    cores = facts.cpu_quota_cores
    own_cores = max(1, int(cores / devices))
    if section.num_workers * devices > cores and section.num_workers > own_cores:
        given = "the DataLoader's num_workers" if asked.num_workers is None else "loader.num_workers"
        on_each = "" if devices == 1 else f" on each of {devices} devices"
        if data.own_loader is not None or asked.num_workers is not None:
            yield (
                f"{given}={section.num_workers}{on_each} is more than the {cores:g} CPU cores this process "
                f"may use; workers will take turns. Set loader.num_workers={own_cores}."
            )
    if data.own_loader is not None:
        yield from _own_warnings(config, data.own_loader)
        return
    if asked.max_skipped and data.has_fetch and section.backend != "torch":
        yield (
            f"loader.max_skipped={asked.max_skipped} is not used: the data have fetch, which loads whole batches. Set "
            "loader.skip_ids=[...], or loader.backend=torch, which reads by __getitem__."
        )
    if asked.device_prefetch and on_gpu and section.device_prefetch == 0:
        other = "loader.backend=inline, which reads by fetch" if data.has_fetch else "give the dataset fetch"
        yield (
            f"loader.device_prefetch={asked.device_prefetch} is not used: samples are built one by one in the training "
            f"process. Set loader.num_workers=1, or {other}."
        )
    beyond = [index for index in asked.skip_ids if not 0 <= index < data.num_train]
    if beyond:
        ids = ",".join(map(str, beyond[:_LISTED]))
        more = f" and {len(beyond) - _LISTED} more" if len(beyond) > _LISTED else ""
        there = f"there are {data.num_train}, counted from 0"
        yield f"loader.skip_ids={ids}{more}: no such training sample; {there}."


def _own_warnings(config: RunConfig, own: OwnLoader) -> Iterator[str]:
    """Yields what a user may not expect of a loader that is used as it came."""
    num_workers, asked = own.values["num_workers"], config.loader
    unused = [f"loader.{knob}={str(getattr(asked, knob)).lower()}" for knob in _NEED_WORKERS if getattr(asked, knob)]
    if num_workers == 0 and unused:
        verb = "is" if len(unused) == 1 else "are"
        yield f"{', '.join(unused)} {verb} not used: {own.name} has no workers. Set loader.num_workers=2."
    if num_workers == 0 and own.has_worker_init:
        yield f"{own.name}: its worker_init_fn is not called, since it has no workers. Set loader.num_workers=2."
    if own.values["persistent_workers"] and "persistent_workers" in own.typed:
        yield (
            f"loader.persistent_workers=true: the workers of {own.name} keep their copy of the dataset. What your code "
            "changes in it between epochs does not reach them."
        )
    if num_workers > 1 and not own.shares_workers:
        yield (
            f"{own.name}: its code does not name torch's get_worker_info(), so each of {num_workers} workers may give "
            "every sample. Set loader.num_workers=1, or let the dataset take its part by get_worker_info()."
        )
    if config.trainer.world_size > 1 and not own.shares_ranks:
        yield (
            f"{own.name}: its code does not name the rank, so each of {config.trainer.ranks} may train on every "
            "sample. Take a part by torch.distributed.get_rank(), or train on one device."
        )
    if own.generators and (num_workers > 0 or asked.num_workers is not None):
        yield (
            f"{own.name}: the dataset holds {' and '.join(own.generators)}, of which each worker gets a copy. So its "
            "draws depend on loader.num_workers. Draw from torch's own generator (torch.rand, torch.randint), which "
            "DataLoaders seed in each worker, or hand over the dataset instead of its loader: Datasets(dataset, ...)."
        )
