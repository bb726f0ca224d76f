"""Who builds batches, how many of them ahead, and how they reach the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wellfed.config.schema import Backend, LoaderConfig, RunConfig
from wellfed.errors import Fault
from wellfed.hardware.facts import MachineFacts
from wellfed.loading.first_batches import FirstBatches
from wellfed.planning.backend import (
    asks_for_timeout,
    asks_to_watch,
    candidates,
    plan_backend,
    show_ms,
    to_time,
)
from wellfed.planning.host_room import NEAR_FRAC, Room, room_for
from wellfed.planning.planned import DataFacts, Planned, as_set, planned
from wellfed.units import MIB, show_bytes

_WORKER_LIMIT: Mapping[str, int] = {"balanced": 4, "aggressive": 16}
"""Most producers of a loader option."""
_MOST_WORKERS = 8
"""Most producers of the others."""
_LISTED = 5
"""Most samples that a warning names."""
PREFETCH_FACTOR = 2
"""torch's default."""
THREADS_PREFETCH = 8
"""A thread builds up to half of them in one go, without waking the training thread between two: record loader_cpu."""
CHEAP_MS, LITTLE_BYTES = 1.0, 256 * MIB
"""Where building several in one go pays, and what may be held for it without asking."""


def plans_to_time(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    data: DataFacts,
    on_gpu: bool,
    first: FirstBatches,
) -> Sequence[Mapping[str, Planned]]:
    """``loader.*`` of each backend that is worth timing, now that the time of building one batch is known."""
    found = []
    for name in to_time(candidates(config.loader, data, choices), first):
        as_asked = replace(config, loader=replace(config.loader, backend=Backend[name]))
        faults: list[Fault] = []
        knobs = plan_loader(as_asked, choices, facts, data=data, on_gpu=on_gpu, faults=faults, warnings=[], first=first)
        if not faults:
            found.append(knobs)
    return found


DEVICE_PREFETCH = 2
"""Batches on the device ahead of the step: one to come, and one for a step that is shorter than others."""


def plan_loader(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    data: DataFacts,
    on_gpu: bool,
    faults: list[Fault],
    warnings: list[str],
    first: FirstBatches | None = None,
) -> dict[str, Planned]:
    """``loader.*`` as it will be done; what can't be goes into ``faults``, what is ignored into ``warnings``."""
    loader = config.loader
    no_room = _without_room(config, facts, first)
    backend = plan_backend(loader, data, choices=choices, warnings=warnings, first=first, no_room=no_room)
    if backend.value == "threads" and not data.has_fetch:
        faults.append(
            Fault(
                "loader.backend",
                "threads needs training data with fetch(indices, rng); this has only __getitem__.",
                "Set loader.backend=processes, or give the dataset fetch.",
            )
        )
    num_workers = _num_workers(config, choices, facts, backend=backend.value, data=data, first=first, warnings=warnings)
    builds_ahead = num_workers.value > 0
    has_processes = builds_ahead and backend.value in ("torch", "processes")
    if not builds_ahead and asks_for_timeout(loader, choices):
        warnings.append(_no_timeout(loader, backend.value, data))
    beyond = [] if data.is_iterable else [index for index in loader.skip_ids if not 0 <= index < data.num_train]
    if beyond:
        warnings.append(_beyond(beyond, data.num_train))
    if builds_ahead and first is not None:
        room = _room(config, facts, first, backend=backend.value, num_workers=num_workers.value)
        if room.is_full:
            faults.append(
                Fault(
                    f"loader.num_workers={room.num_workers}",
                    f"the batches kept ready don't fit: {room.describe()}.",
                    room.way_out(has_fetch=data.has_fetch),
                )
            )
        elif room.is_near:
            warnings.append(
                f"loader.num_workers={room.num_workers}: little is left beside the batches kept ready: "
                f"{room.describe()}. {room.way_out(has_fetch=data.has_fetch)}"
            )
    return {
        "loader.backend": backend,
        "loader.num_workers": num_workers,
        "loader.prefetch_factor": _prefetch_factor(config, backend.value, num_workers.value, first)
        if builds_ahead
        else Planned(None, "nobody builds ahead", "predicted"),
        "loader.persistent_workers": _persistent(loader.persistent_workers, has_processes),
        "loader.pin_memory": _pin(loader.pin_memory, on_gpu),
        "loader.device_prefetch": _device_prefetch(
            loader.device_prefetch, data, on_gpu=on_gpu, builds_ahead=builds_ahead, warnings=warnings
        ),
        "loader.timeout_s": planned(
            loader.timeout_s or 0,
            as_set("loader.timeout_s", loader.timeout_s) or "waits for ever",
            loader.timeout_s is not None,
        )
        if builds_ahead
        else Planned(0, "built when asked for: there is no producer to wait for", "predicted"),
        "loader.worker_threads": planned(
            loader.worker_threads,
            as_set("loader.worker_threads", loader.worker_threads) or "torch's default: one in a worker process",
            loader.worker_threads is not None,
        )
        if has_processes
        else Planned(None, "no worker processes: the training process has one count of threads", "predicted"),
    }


def _no_timeout(loader: LoaderConfig, backend: str, data: DataFacts) -> str:
    if data.is_iterable:
        return f"loader.timeout_s={loader.timeout_s} is not used: the training data is an iterable."
    producers = f"loader.backend={'threads' if data.has_fetch else 'processes'}"
    return (
        f"loader.timeout_s={loader.timeout_s} is not used: {backend} has no producer to wait for. "
        f"Set {producers if loader.backend is Backend.inline else 'loader.num_workers=1'}."
    )


def _beyond(indices: Sequence[int], num_train: int) -> str:
    first = ",".join(map(str, indices[:_LISTED]))
    more = f" and {len(indices) - _LISTED} more" if len(indices) > _LISTED else ""
    return f"loader.skip_ids={first}{more}: no such training sample; there are {num_train}, counted from 0."


def _num_workers(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    backend: str,
    data: DataFacts,
    first: FirstBatches | None,
    warnings: list[str],
) -> Planned:
    asked, devices, cores = config.loader.num_workers, config.trainer.devices, facts.cpu_quota_cores
    if data.is_iterable and asked:
        warnings.append(f"loader.num_workers={asked} is not used: the training data is an iterable.")
    if backend == "inline":
        return planned(0, "built in the training process", asked == 0)
    watch = config.loader.backend is Backend.auto and backend == "threads" and asks_to_watch(config.loader, choices)
    if watch and asked is None and config.loader.prefetch_factor is None:
        return Planned(1, f"one producer, so that it can be watched: {watch}", "predicted")
    own = max(1, int(cores / devices) - 1)
    if asked is None:
        limit = _WORKER_LIMIT.get(choices.get("loader", ""), _MOST_WORKERS)
        each = f"{cores:g} cores" if devices == 1 else f"{cores:g} cores / {devices} devices"
        because = f"{each} less one for training, at least 1, at most {limit}"
        return _no_more_than_needed(min(limit, own), because, config, facts, backend=backend, first=first)
    if asked * devices > cores and asked > own:
        each = "" if devices == 1 else f" on each of {devices} devices"
        warnings.append(
            f"loader.num_workers={asked}{each} is more than the {cores:g} CPU cores this process may use; "
            f"producers will take turns. loader.num_workers={own} leaves one for the training process."
        )
    return Planned(asked, f"loader.num_workers={asked}", "set")


def _no_more_than_needed(
    most: int, because: str, config: RunConfig, facts: MachineFacts, *, backend: str, first: FirstBatches | None
) -> Planned:
    """The quota's number, or fewer where the first batches showed that more are of no use or don't fit."""
    if first is None:
        return Planned(most, because, "predicted")
    of_use = math.ceil(first.build_ms) + 1  # at steps of 1 ms
    room = _room(config, facts, first, backend=backend, num_workers=min(most, of_use))
    if room.most_workers and room.most_workers < room.num_workers:
        fits = f"{because}; the batches of {room.most_workers} fit into {NEAR_FRAC:g} of {room.where}"
        return Planned(room.most_workers, fits, "measured")
    if of_use < most:
        fewer = f"a batch is built in {show_ms(first.build_ms)}, and steps are hardly shorter than 1 ms"
        return Planned(of_use, f"{fewer}: more would wait", "measured")
    return Planned(most, because, "predicted")


def _room(config: RunConfig, facts: MachineFacts, first: FirstBatches, *, backend: str, num_workers: int) -> Room:
    return room_for(
        facts,
        first,
        has_processes=backend != "threads",
        num_workers=num_workers,
        prefetch_factor=_prefetch_factor(config, backend, num_workers, first).value,
        devices=config.trainer.devices,
    )


def _prefetch_factor(config: RunConfig, backend: str, num_workers: int, first: FirstBatches | None) -> Planned:
    asked = config.loader.prefetch_factor
    if asked is not None:
        return Planned(asked, as_set("loader.prefetch_factor", asked), "set")
    if backend == "threads" and first is not None and first.build_ms < CHEAP_MS:
        held = THREADS_PREFETCH * num_workers * first.batch_bytes
        if held <= LITTLE_BYTES:
            because = f"cheap batches are built several at a time; those ready take {show_bytes(held)}"
            return Planned(THREADS_PREFETCH, because, "measured")
    return Planned(PREFETCH_FACTOR, "torch's default", "predicted")


def _without_room(config: RunConfig, facts: MachineFacts, first: FirstBatches | None) -> frozenset[str]:
    """Backends that can't hold the batches of as few producers as may be."""
    if first is None:
        return frozenset()
    least = config.loader.num_workers or 1
    return frozenset(
        name
        for name in ("threads", "processes")
        if _room(config, facts, first, backend=name, num_workers=least).is_full
    )


def _device_prefetch(
    asked: int | None, data: DataFacts, *, on_gpu: bool, builds_ahead: bool, warnings: list[str]
) -> Planned:
    """Batches copied ahead. The thread that copies them builds them too where there are no producers: that may only be
    done for data whose randomness is not that of the process."""
    if not on_gpu:
        return Planned(0, "no device to copy to", "predicted")
    if data.is_iterable and not asked:
        return Planned(0, "an iterable is read where it is asked: its randomness may be the process's", "predicted")
    if not (builds_ahead or data.has_fetch or data.is_iterable):
        if asked:
            warnings.append(
                f"loader.device_prefetch={asked} is not used: samples are built one by one in the training process. "
                "Set loader.num_workers=1, or give the dataset fetch."
            )
        return Planned(0, "samples are built in the training process: nothing is there to be copied ahead", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.device_prefetch={asked}", "set")
    return Planned(DEVICE_PREFETCH, "copies run beside the step, on a stream of their own", "predicted")


def _persistent(asked: bool | None, has_processes: bool) -> Planned:
    if not has_processes:
        return Planned(False, "no worker processes", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.persistent_workers={str(asked).lower()}", "set")
    return Planned(True, "worker processes live on from epoch to epoch", "predicted")


def _pin(asked: bool | None, on_gpu: bool) -> Planned:
    if not on_gpu:
        return Planned(False, "no GPU to copy to", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.pin_memory={str(asked).lower()}", "set")
    return Planned(True, "copies from page-locked memory run beside the host", "predicted")
