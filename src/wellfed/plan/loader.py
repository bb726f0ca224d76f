"""Decides who builds batches, how many of them ahead, and how they reach the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wellfed.config.schema import Backend, RunConfig, ScheduleName
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.data.settings import MOST_PARTS
from wellfed.errors import Fault
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.plan.backend import asks_for_timeout, asks_to_watch, candidates, plan_backend, to_time
from wellfed.plan.host_room import NEAR_FRAC, Room
from wellfed.plan.run_plan import DataFacts, Decided, LoaderSection, OwnLoader, StreamFacts, as_set, by_rule, unless_set
from wellfed.ranks import largest_share
from wellfed.units import GIB, MIB, counted, show_bytes, show_ms, show_percent

_WORKER_LIMIT: Mapping[str, int] = {"balanced": 4, "aggressive": 16}
"""Most workers of a loader option."""
_MOST_WORKERS = 8
"""Most workers of the others."""
_UNSHARED = "has no shard(index, count), and does not ask torch's get_worker_info() for its part"
_IDLE_FRAC = 0.05
"""So much of the ranks' time may be without samples before it is told."""
_LISTED = 5
"""Most samples that a warning names."""
PREFETCH_FACTOR = 2
"""torch's default."""
THREADS_PREFETCH = 8
"""A thread builds up to half of them in one go, without waking the training thread between two: record loader_cpu."""
CHEAP_MS, LITTLE_BYTES = 1.0, 256 * MIB
"""Where building several in one go pays, and what may be held for it without asking."""
DEVICE_PREFETCH = 2
"""Batches on the device ahead of the step: one to come, and one for a step that is shorter than others."""


@dataclass(frozen=True)
class LoaderPlanner:
    """Decides ``loader.*`` from what was asked, the machine, the data and what the first batches have shown."""

    config: RunConfig
    choices: Mapping[str, str]
    facts: MachineFacts
    data: DataFacts
    on_gpu: bool
    first: FirstBatches | None = None
    """None: nothing was timed, rules of thumb decide."""

    def section(self, backend: Decided[str] | None = None) -> LoaderSection:
        """All of ``loader.*``; ``backend`` where it is decided already."""
        asked = self.config.loader
        if asked.backend is Backend.own and self.data.own_loader is not None:
            return self._as_it_came(self.data.own_loader)
        names = candidates(asked, self.data, self.choices)
        backend = backend or plan_backend(asked, self.data, self.choices, names, self.first, self._without_room())
        num_workers = self._num_workers(backend.value)
        num_workers = replace(num_workers, because=num_workers.because + self._in_parts(num_workers.value))
        count, builds_ahead = num_workers.value, num_workers.value > 0
        decided: dict[str, Decided[Any]] = {
            "backend": backend,
            "num_workers": num_workers,
            "prefetch_factor": by_rule(None, "nobody builds ahead"),
            "persistent_workers": by_rule(False, "no worker processes"),
            "pin_memory": by_rule(False, "no GPU to copy to"),
            "device_prefetch": self._device_prefetch(builds_ahead),
            "timeout_s": by_rule(0, "built when asked for: there is no worker to wait for"),
            "worker_threads": by_rule(None, "no worker processes: the training process has one count of threads"),
        }

        def unless_asked(knob: str, value: Any, because: str) -> None:
            decided[knob] = unless_set(f"loader.{knob}", getattr(asked, knob), value, because)

        if builds_ahead:
            decided["prefetch_factor"] = self._prefetch_factor(backend.value, count)
            unless_asked("timeout_s", 0, "waits for ever")
        if builds_ahead and backend.value in ("torch", "processes"):
            unless_asked("persistent_workers", True, "worker processes live on from epoch to epoch")
            unless_asked("worker_threads", None, "torch's default: one in a worker process")
        if self.on_gpu:
            unless_asked("pin_memory", True, "copies from page-locked memory run beside the host")
        return self._section(decided, candidates=names, eval_workers=count)

    def _as_it_came(self, own: OwnLoader) -> LoaderSection:
        """Told of a DataLoader that is left alone, not decided."""
        as_it_came = {
            "num_workers": own.num_workers,
            "prefetch_factor": own.prefetch_factor,
            "persistent_workers": own.persistent_workers,
            "pin_memory": own.pin_memory,
            "timeout_s": own.timeout_s,
        }
        backend = "the DataLoader as it came; a resumed run reads its epoch again up to where it was left"
        decided: dict[str, Decided[Any]] = {"backend": Decided("own", backend, "set")}
        decided |= {knob: Decided(value, "as the DataLoader has it", "set") for knob, value in as_it_came.items()}
        ahead = self.config.loader.device_prefetch if self.on_gpu else None
        because = "as the DataLoader has it: nothing is copied ahead"
        decided["device_prefetch"] = unless_set("loader.device_prefetch", ahead, 0, because)
        decided["worker_threads"] = by_rule(None, "torch's default: one in a worker process")
        return self._section(decided, candidates=(), eval_workers=0)

    def _section(self, decided: Mapping[str, Decided[Any]], **more: Any) -> LoaderSection:
        build_ms = None if self.first is None else self.first.build_ms
        facts = {"has_fetch": self.data.has_fetch, "most_workers": self._most_readers, "build_ms": build_ms}
        return LoaderSection.of(decided, **facts, **more)

    def _own_faults(self) -> Iterator[Fault]:
        """What was asked of a DataLoader of the user's, or of one that is not there."""
        own, asked, effective = self.data.own_loader, self.config.loader, self.config.workload.effective_batch_size
        if asked.backend is not Backend.own:
            if problem := self.data.only_as_it_came:
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
        if self.config.trainer.world_size > 1:
            problem = f"each of {self.config.trainer.ranks} would read the whole of the DataLoader."
            yield Fault("loader.backend=own", problem, "Set another loader option, which shares each step out.")

    def faults(self, section: LoaderSection) -> Iterator[Fault]:
        """What was asked of the loader and can't be."""
        asked, data = self.config.loader, self.data
        yield from self._own_faults()
        if data.stream is not None:
            yield from self._stream_faults(data.stream, section)
        elif section.backend == "threads" and not data.has_fetch:
            problem = "threads needs training data with fetch(indices, rng); this has only __getitem__."
            yield Fault("loader.backend", problem, "Set loader.backend=processes, or give the dataset fetch.")
        room = self._room_of(section)
        if room is not None and room.is_full:
            problem = f"the batches kept ready don't fit: {room.describe()}."
            yield Fault(f"loader.num_workers={room.num_workers}", problem, room.way_out(has_fetch=data.has_fetch))
        trainer = self.config.trainer
        if asked.max_skipped and not data.is_iterable and trainer.world_size > 1:
            yield Fault(
                "loader.max_skipped",
                f"{asked.max_skipped} with {trainer.ranks}: a rank does not know that another left out a "
                "sample of the step.",
                "Set loader.max_skipped=0 and loader.skip_ids=[...], or one device.",
            )

    def warnings(self, section: LoaderSection) -> Iterator[str]:
        """What was asked of the loader and is ignored, or is near a limit."""
        asked, data = self.config.loader, self.data
        if data.stream is not None:
            yield from self._stream_warnings(data.stream, section)
        elif asked.shuffle_buffer is not None:
            unused = f"loader.shuffle_buffer={asked.shuffle_buffer} is not used"
            yield f"{unused}: samples that have an index are shuffled all together."
        devices, cores, own = self.config.trainer.devices, self.facts.cpu_quota_cores, self._cores_of_a_device()
        if section.num_workers * devices > cores and section.num_workers > own and asked.num_workers is not None:
            on_each = "" if devices == 1 else f" on each of {devices} devices"
            yield (
                f"loader.num_workers={asked.num_workers}{on_each} is more than the {cores:g} CPU cores this process "
                f"may use; workers will take turns. loader.num_workers={own} leaves one for the training process."
            )
        if section.num_workers == 0 and asks_for_timeout(asked, self.choices):
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
        room = self._room_of(section)
        if room is not None and room.is_near:
            yield (
                f"loader.num_workers={room.num_workers}: little is left beside the batches kept ready: "
                f"{room.describe()}. {room.way_out(has_fetch=data.has_fetch)}"
            )
        if asked.device_prefetch and self.on_gpu and section.device_prefetch == 0:
            yield (
                f"loader.device_prefetch={asked.device_prefetch} is not used: samples are built one by one in the "
                "training process. Set loader.num_workers=1, or give the dataset fetch."
            )

    def _stream_faults(self, stream: StreamFacts, section: LoaderSection) -> Iterator[Fault]:
        config, asked = self.config, self.config.loader.num_workers
        world, most = config.trainer.world_size, self._most_readers
        if world > 1 and (stream.shared_by is None or stream.shares_ranks_itself):
            own = "asks torch.distributed for its rank, which a worker process does not have"
            why = own if stream.shares_ranks_itself else _UNSHARED
            way_out = "Give it shard(index, count), or train on one device."
            problem = f"with {stream.name}, which {why}: each rank might train on every sample."
            yield Fault(config.trainer.ranks, problem, way_out)
        elif stream.num_shards is not None and world > stream.num_shards:
            problem = (
                f"with {stream.name}, which can be read in {counted(stream.num_shards, 'part')} (num_shards): "
                f"{counted(world - stream.num_shards, 'rank')} would have no samples."
            )
            way_out = f"Set {config.trainer.with_ranks(stream.num_shards)}, or cut the data into more shards."
            yield Fault(config.trainer.ranks, problem, way_out)
        elif asked is not None and most is not None and asked > most:
            where = f"loader.num_workers={asked}"
            if stream.shared_by is None:
                problem = f"{stream.name} {_UNSHARED}: each worker would give every sample."
                yield Fault(
                    where, problem, "Set loader.num_workers=1, which reads ahead, or give it shard(index, count)."
                )
            else:
                on_each = "" if world == 1 else f" on each of {world} devices"
                problem = f"{stream.name} can be read in {most} parts{on_each} (num_shards)."
                yield Fault(where, problem, f"Set loader.num_workers={most}.")
        trainer, schedule = config.trainer, config.workload.schedule.name
        if schedule is not ScheduleName.constant and trainer.max_steps is None and not stream.has_length:
            problem = f"needs the number of the last step, and {stream.name} has no __len__ to tell it."
            yield Fault(
                f"workload.schedule.name={schedule}", problem, "Set trainer.max_steps=1000, or give it __len__."
            )

    def _stream_warnings(self, stream: StreamFacts, section: LoaderSection) -> Iterator[str]:
        asked = self.config.loader
        if section.backend == "threads":
            yield (
                f"loader.backend=threads: what {stream.name} draws from the generators of Python, numpy and torch is "
                "drawn beside the step, and can't be repeated. Let it have a generator of its own, or set "
                "loader.backend=processes."
            )
        world, num_shards = self.config.trainer.world_size, stream.num_shards
        most = largest_share(num_shards or world, world)
        idle = 1 - (num_shards or world) / (most * world)
        if stream.shared_by and idle >= _IDLE_FRAC:
            yield (
                f"{stream.name} can be read in {num_shards} parts (num_shards): of {world} ranks some have {most} and "
                f"others {most - 1}, which are without samples at the end of each epoch, {show_percent(idle)} of all "
                f"ranks' time. A multiple of {world} shards leaves none without."
            )
        for knob, value in (("max_skipped", asked.max_skipped), ("skip_ids", list(asked.skip_ids))):
            if value:
                shown = str(value).replace(" ", "")
                yield f"loader.{knob}={shown} is not used: a stream's samples have no index to be left out by."

    @property
    def _most_readers(self) -> int | None:
        """Workers on a device that can read a stream; None = as many as one likes."""
        stream = self.data.stream
        if stream is None or (stream.shared_by and stream.num_shards is None):
            return None
        if stream.shared_by is None:
            return 1
        return max(1, min(MOST_PARTS, (stream.num_shards or 1) // self.config.trainer.world_size))

    def _in_parts(self, num_workers: int) -> str:
        """How a stream's order comes about, for the reason of ``num_workers``; empty for other data."""
        stream, world = self.data.stream, self.config.trainer.world_size
        if stream is None:
            return ""
        if stream.shared_by is None:
            return f"; {stream.name} {_UNSHARED}: one reads it"
        if stream.num_shards is not None:
            return f"; read in {self._most_readers} parts in turn, whoever reads them"
        if num_workers * world < 2:
            return ""
        return f"; read in {num_workers} parts in turn: the order of samples goes by the number of workers"

    def to_time(self) -> list[LoaderSection]:
        """What would be planned with each backend that is worth timing, now that building one batch has been timed."""
        assert self.first is not None
        names = to_time(candidates(self.config.loader, self.data, self.choices), self.first)
        sections = [self.section(by_rule(name, "to be timed")) for name in names]
        return [section for section in sections if not any(self.faults(section))]

    def for_evaluation(self, section: LoaderSection, micro_batch: int) -> tuple[LoaderSection, list[str]]:
        """With as many workers for an evaluation as there is room for, and a warning where they are fewer.

        A validation comes in the midst of an epoch, when the batches of training are ready too. Its own have
        ``workload.eval_batch_size`` samples, else ``micro_batch``, taken to be as large as those of training.
        """
        size = self.config.workload.eval_batch_size or self.data.eval_batch_size or micro_batch
        train = self._room_of(section)
        if train is None or self.first is None or not self.data.num_eval:
            return section, []
        of_a_step = largest_share(self.config.workload.samples_per_step, self.config.trainer.world_size)
        both = replace(
            train,
            batch_bytes=math.ceil(self.first.batch_bytes * size / of_a_step),
            num_batches=math.ceil(self.data.num_eval / size),
            free_bytes=train.free_bytes - train.needed_bytes,
        )
        most = both.most_workers
        if most == section.num_workers:
            return section, []
        warning = (
            f"loader.num_workers={section.num_workers}: an evaluation has {most or 'none'} of them, since "
            f"{train.where} has no room for more beside the batches kept ready for training "
            f"({show_bytes(train.needed_bytes)})."
        )
        return replace(section, eval_workers=most), [warning]

    def _cores_of_a_device(self) -> int:
        """But one, which trains."""
        return max(1, int(self.facts.cpu_quota_cores / self.config.trainer.devices) - 1)

    def _num_workers(self, backend: str) -> Decided[int]:
        asked, devices, cores = self.config.loader, self.config.trainer.devices, self.facts.cpu_quota_cores
        if backend == "inline":
            return by_rule(0, "built in the training process", is_set=asked.num_workers == 0)
        if asked.num_workers is not None:
            return Decided(asked.num_workers, f"loader.num_workers={asked.num_workers}", "set")
        watch = asks_to_watch(asked, self.choices)
        if watch and backend == "threads" and asked.backend is Backend.auto and asked.prefetch_factor is None:
            return by_rule(1, f"one worker, so that it can be watched: {watch}")
        limit = _WORKER_LIMIT.get(self.choices.get("loader", ""), _MOST_WORKERS)
        limit = min(limit, self._most_readers or limit)
        most = min(limit, self._cores_of_a_device())
        each = f"{cores:g} cores" if devices == 1 else f"{cores:g} cores / {devices} devices"
        because = f"{each} less one for training, at least 1, at most {limit}"
        if self.first is None:
            return by_rule(most, because)
        # Fewer where the first batches showed that more are of no use or don't fit.
        of_use = math.ceil(self.first.build_ms) + 1  # at steps of 1 ms
        room = self._room(self.first, backend, min(most, of_use))
        if room.most_workers and room.most_workers < room.num_workers:
            fits = f"{because}; the batches of {room.most_workers} fit into {NEAR_FRAC:g} of {room.where}"
            return Decided(room.most_workers, fits, "measured")
        if of_use < most:
            fewer = f"a batch is built in {show_ms(self.first.build_ms)}, and steps are hardly shorter than 1 ms"
            return Decided(of_use, f"{fewer}: more would wait", "measured")
        return by_rule(most, because)

    def _prefetch_factor(self, backend: str, num_workers: int) -> Decided[int]:
        asked, first = self.config.loader.prefetch_factor, self.first
        if asked is not None:
            return Decided(asked, as_set("loader.prefetch_factor", asked), "set")
        if backend == "threads" and first is not None and first.build_ms < CHEAP_MS:
            held = THREADS_PREFETCH * num_workers * first.batch_bytes
            if held <= LITTLE_BYTES:
                because = f"cheap batches are built several at a time; those ready take {show_bytes(held)}"
                return Decided(THREADS_PREFETCH, because, "measured")
        return by_rule(PREFETCH_FACTOR, "torch's default")

    def _room(self, first: FirstBatches, backend: str, num_workers: int) -> Room:
        """The tightest of host memory and, for worker processes, /dev/shm, which their batches pass through."""
        has_processes, shm_gib = backend != "threads", self.facts.shm_free_gib
        where, free_gib = "host memory", self.facts.ram_available_gib
        if has_processes and shm_gib is not None and shm_gib < free_gib:
            where, free_gib = "/dev/shm", shm_gib
        factor, devices = self._prefetch_factor(backend, num_workers).value, self.config.trainer.devices
        size, count = first.batch_bytes, first.num_batches
        return Room(num_workers, factor, devices, size, count, has_processes, where, free_gib * GIB)

    def _room_of(self, section: LoaderSection) -> Room | None:
        """What the workers of training keep ready; None where there are none, or no batch was built."""
        if section.num_workers == 0 or self.first is None:
            return None
        return self._room(self.first, section.backend, section.num_workers)

    def _without_room(self) -> frozenset[str]:
        """Backends that can't hold the batches of as few workers as may be."""
        first, least = self.first, self.config.loader.num_workers or 1
        if first is None:
            return frozenset()
        return frozenset(name for name in ("threads", "processes") if self._room(first, name, least).is_full)

    def _device_prefetch(self, builds_ahead: bool) -> Decided[int]:
        """Batches copied ahead. The thread that copies them builds them too where there are no workers: that may
        only be done for data whose randomness is not that of the process."""
        asked, data = self.config.loader.device_prefetch, self.data
        if not self.on_gpu:
            return by_rule(0, "no device to copy to")
        if not (builds_ahead or data.has_fetch):
            return by_rule(0, "samples are built in the training process: nothing is there to be copied ahead")
        because = "copies run beside the step, on a stream of their own"
        return unless_set("loader.device_prefetch", asked, DEVICE_PREFETCH, because)
