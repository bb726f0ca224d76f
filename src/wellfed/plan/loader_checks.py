"""Finds faults and warnings in the settings of the loader, once ``loader.*`` is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wellfed.config.schema import Backend, RunConfig, ScheduleName
from wellfed.errors import Fault
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.backend import asks_for_timeout
from wellfed.plan.ready_batches import ReadyBatches
from wellfed.plan.run_plan import DataFacts, LoaderSection, StreamFacts
from wellfed.units import counted

UNSHARED = "has no shard(index, count), and does not ask torch's get_worker_info() for its part"
_LISTED = 5
"""Maximum number of samples named in a warning."""


def loader_faults(
    config: RunConfig, data: DataFacts, section: LoaderSection, ready: ReadyBatches | None
) -> Iterator[Fault]:
    """Yields faults of settings of the loader that are impossible.

    Args:
        ready: ready batches of its workers, if known.
    """
    asked, trainer = config.loader, config.trainer
    yield from _own_faults(config, data)
    if data.stream is not None:
        yield from _stream_faults(config, data.stream, section)
    if section.backend == "threads" and (data.is_iterable or not data.has_fetch):
        problem = "threads needs training data with fetch(indices, rng), and these have none."
        yield Fault("loader.backend", problem, "Set loader.backend=processes, or give the dataset fetch.")
    if ready is not None and ready.is_full:
        problem = f"the batches kept ready don't fit: {ready.describe()}."
        yield Fault(f"loader.num_workers={ready.num_workers}", problem, ready.way_out)
    if asked.max_skipped and not data.is_iterable and trainer.world_size > 1:
        yield Fault(
            "loader.max_skipped",
            f"{asked.max_skipped} with {trainer.ranks}: a rank does not know that another left out a "
            "sample of the step.",
            "Set loader.max_skipped=0 and loader.skip_ids=[...], or one device.",
        )


def _own_faults(config: RunConfig, data: DataFacts) -> Iterator[Fault]:
    own, effective = data.own_loader, config.workload.effective_batch_size
    if config.loader.backend is not Backend.own:
        if problem := data.only_as_it_came:
            way_out = "Set loader=own, which leaves it as it came."
            yield Fault("workload.data", f"the DataLoader of {problem}: it can't be built again.", way_out)
        return
    if own is None:
        problem = "leaves a DataLoader as it came, and workload.data gives none for training."
        yield Fault("loader.backend=own", problem, "Set loader=auto, or let workload.data return DataLoaders.")
        return
    if own.batch_size not in (None, effective):
        problem = f"the DataLoader's batches have {own.batch_size}, and loader.backend=own leaves them as they are."
        way_out = "Set workload.effective_batch_size=null, or another loader option."
        yield Fault(f"workload.effective_batch_size={effective}", problem, way_out)
    if config.trainer.overfit_batches is not None:
        problem = "the next pass of a DataLoader that is left as it came may have other batches."
        yield Fault("trainer.overfit_batches", problem, "Set loader=auto, or limit the DataLoader's data set.")
    if config.trainer.world_size > 1:
        problem = f"each of {config.trainer.ranks} would read the whole of the DataLoader."
        yield Fault("loader.backend=own", problem, "Set another loader option, which shares each step out.")


def _stream_faults(config: RunConfig, stream: StreamFacts, section: LoaderSection) -> Iterator[Fault]:
    trainer, asked, most = config.trainer, config.loader.num_workers, section.most_workers
    world = trainer.world_size
    if world > 1 and stream.shared_by is None:
        problem = f"with {stream.name}, which {UNSHARED}: each rank might train on every sample."
        yield Fault(trainer.ranks, problem, "Give it shard(index, count), or train on one device.")
    elif stream.num_shards is not None and world > stream.num_shards:
        problem = (
            f"with {stream.name}, which can be read in {counted(stream.num_shards, 'part')} (num_shards): "
            f"{counted(world - stream.num_shards, 'rank')} would have no samples."
        )
        way_out = f"Set {trainer.with_ranks(stream.num_shards)}, or cut the data into more shards."
        yield Fault(trainer.ranks, problem, way_out)
    elif asked is not None and most is not None and asked > most:
        if stream.shared_by is None:
            problem = f"{stream.name} {UNSHARED}: each worker would give every sample."
            way_out = "Set loader.num_workers=1, which reads ahead, or give it shard(index, count)."
        else:
            on_each = "" if world == 1 else f" on each of {world} devices"
            problem = f"{stream.name} can be read in {most} parts{on_each} (num_shards)."
            way_out = f"Set loader.num_workers={most}."
        yield Fault(f"loader.num_workers={asked}", problem, way_out)
    schedule = config.workload.schedule.name
    if schedule is not ScheduleName.constant and trainer.max_steps is None and not stream.has_length:
        problem = f"needs the number of the last step, and {stream.name} has no __len__ to tell it."
        yield Fault(f"workload.schedule.name={schedule}", problem, "Set trainer.max_steps=1000, or give it __len__.")


def loader_warnings(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    data: DataFacts,
    section: LoaderSection,
) -> Iterator[str]:
    """Yields warnings about settings of the loader that are ignored."""
    asked, devices = config.loader, config.trainer.devices
    cores = facts.cpu_quota_cores
    own_cores = max(1, int(cores / devices))
    if data.stream is not None:
        yield from _stream_warnings(config, data.stream)
    if section.num_workers * devices > cores and section.num_workers > own_cores and asked.num_workers is not None:
        on_each = "" if devices == 1 else f" on each of {devices} devices"
        yield (
            f"loader.num_workers={asked.num_workers}{on_each} is more than the {cores:g} CPU cores this process "
            f"may use; workers will take turns. Set loader.num_workers={own_cores}."
        )
    if asked.max_skipped and data.has_fetch and section.backend != "torch":
        yield (
            f"loader.max_skipped={asked.max_skipped} is not used: the data have fetch, which loads whole batches. Set "
            "loader.skip_ids=[...], or loader.backend=torch, which reads by __getitem__."
        )
    if section.num_workers == 0 and asks_for_timeout(asked, choices):
        unused = f"loader.timeout_s={asked.timeout_s} is not used"
        workers = f"loader.backend={'threads' if data.has_fetch else 'processes'}"
        way_out = workers if asked.backend is Backend.inline else "loader.num_workers=1"
        yield f"{unused}: {section.backend} has no worker to wait for. Set {way_out}."
    beyond = [] if data.stream else [index for index in asked.skip_ids if not 0 <= index < data.num_train]
    if beyond:
        ids = ",".join(map(str, beyond[:_LISTED]))
        more = f" and {len(beyond) - _LISTED} more" if len(beyond) > _LISTED else ""
        there = f"there are {data.num_train}, counted from 0"
        yield f"loader.skip_ids={ids}{more}: no such training sample; {there}."


def _stream_warnings(config: RunConfig, stream: StreamFacts) -> Iterator[str]:
    world, num_shards = config.trainer.world_size, stream.num_shards
    if stream.shared_by and num_shards and num_shards % world:
        yield (
            f"{stream.name} can be read in {num_shards} parts (num_shards), which {world} ranks can't share evenly. An "
            "epoch ends when a rank has no other batch, so samples of the others are left out. Set num_shards to a "
            f"multiple of {world}."
        )
    for knob, value in (("max_skipped", config.loader.max_skipped), ("skip_ids", list(config.loader.skip_ids))):
        if value:
            shown = str(value).replace(" ", "")
            yield f"loader.{knob}={shown} is not used: a stream's samples have no index to be left out by."
