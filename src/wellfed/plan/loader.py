"""Decides which backend builds batches, how many are built ahead, and how they reach the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wellfed.config.schema import Backend, RunConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.data.worker_count import MOST_WORKERS
from wellfed.errors import Fault
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.backend import MESSAGE_MS, candidates, plan_backend, to_time
from wellfed.plan.loader_checks import loader_faults, loader_warnings
from wellfed.plan.ready_batches import NEAR_FRAC, Room
from wellfed.plan.run_plan import DataFacts, Decided, LoaderSection, OwnLoader, as_set, by_rule, unless_set
from wellfed.units import GIB, show_ms

_WORKER_LIMIT: Mapping[str, int] = {"balanced": 4, "aggressive": 16}
"""Maximum number of workers of a loader option."""
_MOST_WORKERS = 8
"""Maximum number of workers of other options, unless a measured step needs more."""
_SLACK = 1.25
"""Factor on the time to build a batch, since workers disturb each other and the step."""
DEVICE_PREFETCH = 2
"""Batches on the device before their steps: the next, and one more for a short step."""


@dataclass(frozen=True)
class LoaderPlanner:
    """Decides ``loader.*`` from the configuration, the machine, the data and the first batches."""

    config: RunConfig
    choices: Mapping[str, str]
    facts: MachineFacts
    data: DataFacts
    on_gpu: bool
    first: FirstBatches | None = None
    """None = nothing was timed; rules of thumb decide."""

    def section(self, backend: Decided[str] | None = None) -> LoaderSection:
        """Returns all of ``loader.*``; ``backend`` if it is already decided."""
        if self.data.own_loader is not None:
            return self._as_it_came(self.data.own_loader)
        asked, build_ms = self.config.loader, None if self.first is None else self.first.build_ms
        names = candidates(asked, self.data)
        backend = backend or plan_backend(asked, self.data, names, self.first, self._too_large())
        num_workers = self._num_workers(backend.value)
        builds_ahead = num_workers.value > 0
        decided: dict[str, Decided[Any]] = {
            "backend": backend,
            "num_workers": num_workers,
            "prefetch_factor": by_rule(None, "nobody builds ahead"),
            "persistent_workers": by_rule(False, "no worker processes"),
            "pin_memory": by_rule(False, "no GPU to copy to"),
            "device_prefetch": self._device_prefetch(backend.value, builds_ahead),
            "timeout_s": by_rule(0, "built when asked for: there is no worker to wait for"),
        }

        def unless_asked(knob: str, value: Any, because: str) -> None:
            decided[knob] = unless_set(f"loader.{knob}", getattr(asked, knob), value, because)

        if builds_ahead:
            decided["prefetch_factor"] = self._prefetch_factor()
            unless_asked("timeout_s", 0, "waits for ever")
        if builds_ahead and backend.value in ("torch", "processes"):
            unless_asked("persistent_workers", True, "worker processes live on from epoch to epoch")
        if self.on_gpu:
            unless_asked("pin_memory", True, "copies from page-locked memory run beside the host")
        return LoaderSection.of(decided, candidates=names, has_fetch=self.data.has_fetch, build_ms=build_ms)

    @property
    def needs_step(self) -> bool:
        """Whether the time of a step decides, beside that of a batch, which loader is planned."""
        assert self.first is not None
        asked = self.config.loader
        count_is_open = asked.num_workers is None and asked.backend in (Backend.threads, Backend.processes)
        names = candidates(asked, self.data)
        return bool(to_time(names, self.first)) or (
            (count_is_open or len(names) > 1) and self.first.build_ms >= MESSAGE_MS
        )

    def to_time(self) -> list[LoaderSection]:
        """Returns the plan for each backend worth timing, after one batch was timed."""
        assert self.first is not None
        names = to_time(candidates(self.config.loader, self.data), self.first)
        sections = [self.section(by_rule(name, "to be timed")) for name in names]
        return [section for section in sections if not any(self.faults(section))]

    def faults(self, section: LoaderSection) -> list[Fault]:
        """Returns faults of settings of the loader that are impossible."""
        found = list(loader_faults(self.config, self.data, section))
        if self.first is not None and section.num_workers and self.data.own_loader is None:
            full = self._room(self.first, section.backend).fault(section.num_workers)
            found += [] if full is None else [full]
        return found

    def warnings(self, section: LoaderSection) -> list[str]:
        """Returns warnings about settings of the loader that are ignored."""
        found = list(loader_warnings(self.config, self.facts, self.data, section, on_gpu=self.on_gpu))
        timeout_s, is_typed = self.config.loader.timeout_s, self.choices.get("loader", "auto") == "auto"
        if timeout_s and is_typed and section.num_workers == 0 and self.data.own_loader is None:
            unused = f"loader.timeout_s={timeout_s} is not used: {section.backend} has no worker to wait for."
            found.append(f"{unused} Set loader.num_workers=1.")
        return found

    def _as_it_came(self, own: OwnLoader) -> LoaderSection:
        decided: dict[str, Decided[Any]] = {"backend": Decided("own", f"{own.name}, as it came", "set")}
        for knob, value in own.values.items():
            is_typed = knob in own.typed and getattr(self.config.loader, knob) == value
            because = as_set(f"loader.{knob}", value) if is_typed else "its DataLoader, as it came"
            decided[knob] = Decided(value, because, "set")
        has_workers, asked = own.values["num_workers"] > 0, self.config.loader.device_prefetch
        if self.on_gpu and has_workers:
            ahead = unless_set("loader.device_prefetch", asked, 0, "as it came: nothing is copied ahead")
        else:
            because = "no device to copy to" if has_workers else "its batches are built in the training process"
            ahead = by_rule(0, because)
        decided["device_prefetch"] = ahead
        most = None if own.shares_workers else 1
        return LoaderSection.of(decided, candidates=(), has_fetch=False, most_workers=most)

    def _num_workers(self, backend: str) -> Decided[int]:
        asked, devices, cores = self.config.loader, self.config.trainer.devices, self.facts.cpu_quota_cores
        if backend == "inline":
            return by_rule(0, "built in the training process", is_set=asked.num_workers == 0)
        if asked.num_workers is not None:
            return Decided(asked.num_workers, f"loader.num_workers={asked.num_workers}", "set")
        cores_each = max(1, int(cores / devices))
        first = self.first
        work, waits_outside = (None, False) if first is None else (first.work(cores_each, _SLACK), first.waits_outside)
        limit = _WORKER_LIMIT.get(self.choices.get("loader", ""), _MOST_WORKERS if work is None else MOST_WORKERS)
        most = limit if waits_outside and work is not None else min(limit, cores_each)
        each = f"{cores:g} cores" if devices == 1 else f"{cores:g} cores / {devices} devices"
        because = f"{each}, at most {limit}"
        if first is None:
            return by_rule(most, because)
        # Fewer if the first batches show that more are useless or don't fit.
        if work is None:
            of_use, steps = math.ceil(first.build_ms) + 1, "and steps are hardly shorter than 1 ms"
        else:
            of_use = work.workers_advised(most, cores_each, waits_outside=waits_outside)
            steps = f"a step takes {show_ms(work.step_ms)}"
        room = self._room(first, backend)
        fitting = room.most_workers(min(most, of_use))
        if 0 < fitting < min(most, of_use):
            fits = f"{because}; the batches of {fitting} fit into {NEAR_FRAC:g} of {room.where}"
            return Decided(fitting, fits, "measured")
        if of_use < most or work is not None:
            enough = f"a batch is built in {show_ms(first.build_ms)}, {steps}"
            is_capped = (
                work is not None and work.workers_advised(MOST_WORKERS, cores_each, waits_outside=waits_outside) > most
            )
            why = because if is_capped else f"more would win nothing on {each}"
            return Decided(min(most, of_use), f"{enough}: {why}", "measured")
        return by_rule(most, because)

    def _prefetch_factor(self) -> Decided[int]:
        return unless_set("loader.prefetch_factor", self.config.loader.prefetch_factor, 2, "torch's default")

    def _device_prefetch(self, backend: str, builds_ahead: bool) -> Decided[int]:
        """Decides the number of batches copied ahead.

        Without workers the copying thread would build them, which is impossible if the data draw from the process's
        generators. That may be all data read by ``__getitem__``, as the backend torch does even where there is fetch.
        """
        asked, data = self.config.loader.device_prefetch, self.data
        if not self.on_gpu:
            return by_rule(0, "no device to copy to")
        if not (builds_ahead or (data.has_fetch and backend != "torch")):
            because = "samples are built in the training process: nothing is there to be copied ahead"
            return by_rule(0, because, is_set=asked == 0)
        because = "copies run beside the step, on a stream of their own"
        return unless_set("loader.device_prefetch", asked, DEVICE_PREFETCH, because)

    def _room(self, first: FirstBatches, backend: str) -> Room:
        """Returns the room in host memory or, for worker processes, in /dev/shm if that has less free."""
        has_processes, shm_gib = backend != "threads", self.facts.shm_free_gib
        where, free_gib = "host memory", self.facts.ram_available_gib
        if has_processes and shm_gib is not None and shm_gib < free_gib:
            where, free_gib = "/dev/shm", shm_gib
        factor, devices = self._prefetch_factor().value, self.config.trainer.devices
        return Room(factor, devices, first.batch_bytes, first.num_batches, has_processes, where, free_gib * GIB)

    def _too_large(self) -> frozenset[str]:
        """Returns the backends whose batches don't fit even with the fewest workers."""
        first, least = self.first, self.config.loader.num_workers or 1
        if first is None:
            return frozenset()
        return frozenset(name for name in ("threads", "processes") if self._room(first, name).fault(least))
