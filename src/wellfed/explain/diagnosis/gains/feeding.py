"""Predicts the time of a step with another number of workers, from the recorded steps and batches.

A step takes at least: its time without waiting, the time to build a batch over the number of workers, and all CPU time
of a step over the cores. Waiting for disk or network while building is not CPU time, so there more workers than cores
help.

Batches take unequal times, and a short queue bridges few slow ones. So a gain is simulated with build times drawn from
the recorded ones. Its lower end assumes that all waiting within a build is for one shared resource (a lock, a rate
limit, a saturated store). Such a resource serves no more batches to more workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wellfed.data.worker_count import BUILD_WAITS_FRAC, MOST_WORKERS, Work
from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence, once
from wellfed.explain.diagnosis.finding import Gain
from wellfed.explain.diagnosis.script_words import OF_LOADER
from wellfed.explain.diagnosis.words import Figures
from wellfed.units import GIB, MIB

_SLACK = 1.25
"""Factor on the build time for the lower end of a gain, since workers disturb each other and the step."""
_PREFETCH = 2
"""torch's default."""
_REPLICATES, _MOST_SIMULATED, _BLOCK = 40, 512, 8
"""Simulated runs, maximum steps of each, and successive steps that are drawn together."""
_TAIL = 0.025
"""Share of the simulated runs below the lower end of a gain."""


@dataclass(frozen=True)
class Feeding:
    """Time of a step, and time to build its batch."""

    step_ms: float
    fed_ms: float
    """Milliseconds of a step without waiting for data."""
    build_ms: float
    build_cpu_ms: float
    cpu_ms: float
    """CPU milliseconds of a step in all processes of the run, building included."""
    cores: float
    others: float
    """Cores kept busy by other processes, other ranks included, among those that this run may use."""
    num_workers: int
    most_workers: int
    """Maximum number of workers, by memory and data."""
    bound: float
    """Maximum speed-up of the run."""
    is_estimate: bool
    """Whether the build time is derived from the waiting of the steps."""
    lock_frac: float = 0.0
    """Share of its time for which a worker waits for a lock that the workers share."""
    alone_ms: float | None = None
    """Milliseconds to build a batch before training, by a single worker; None if not timed."""
    builds: tuple[float, ...] = ()
    """Milliseconds of single batches, in order; empty if only the mean is known."""
    prefetch: int = _PREFETCH
    ranks: int = 1
    """Ranks that share the cores."""

    @property
    def wait_frac(self) -> float:
        """Share of a step that waits for data."""
        return 1 - self.fed_ms / self.step_ms

    @property
    def cpu_frac(self) -> float:
        """CPU time over wall time of building."""
        return self.build_cpu_ms / self.build_ms

    @property
    def work(self) -> Work:
        """Time and CPU time of a step and its batch, beside other processes."""
        alone_ms = self.build_cpu_ms if self.waits_for_core else self.build_ms
        return Work(self.fed_ms, alone_ms, self.cpu_ms, max(1.0, self.cores - self.others))

    @property
    def is_cpu_full(self) -> bool:
        """Whether nearly all cores are busy, with any process."""
        full_frac = limits.CROWDED_FRAC if self.num_workers > self.cores else limits.CPU_FULL_FRAC
        return self.cpu_ms / self.step_ms + self.others >= full_frac * self.cores

    @property
    def has_other_load(self) -> bool:
        """Whether other processes keep many cores busy."""
        return self.others >= limits.OTHERS_FRAC * self.cores

    @property
    def waits_outside(self) -> bool:
        """Whether building is mostly waiting for something other than a core."""
        if not self.is_cpu_full:
            return self.cpu_frac < BUILD_WAITS_FRAC
        # A process that always needs a core gets about this share of one.
        fair_frac = min(1.0, self.cores / (self.num_workers + 1 + self.others))
        return self.cpu_frac < limits.QUEUED_FRAC * fair_frac

    @property
    def contention(self) -> float | None:
        """Time to build a batch beside other workers over the time alone; None if waiting does not explain it. Even the
        fastest tenth of the batches must take longer, since single slow ones show no shared resource."""
        if self.num_workers < 2 or not self.waits_outside:
            return None
        factor = 1 / (1 - min(self.lock_frac, 0.99))
        # Beside other programs, workers may wait for cores.
        is_alone = not self.has_other_load or self.build_cpu_ms <= limits.HARDLY_WORK_FRAC * (self.alone_ms or 0.0)
        if self.alone_ms and is_alone:
            quickest_ms = float(np.quantile(self.builds, 0.1)) if self.builds else self.build_ms
            factor = max(factor, quickest_ms / self.alone_ms)
        return factor if factor >= limits.CONTENTION_FACTOR else None

    @property
    def waits_for_core(self) -> bool:
        """Whether building needs CPU, and no core is left for it."""
        return self.is_cpu_full and not self.waits_outside

    @cached_property
    def workers_needed(self) -> int:
        """Smallest sufficient number of workers, if all batches took equally long."""
        return self.work.workers_needed(self.most_workers)

    @property
    def has_enough(self) -> bool:
        """Whether the workers keep up with steps that never wait."""
        return self.build_ms <= limits.CAPACITY_FRAC * self.num_workers * self.fed_ms

    @property
    def workers_advised(self) -> int:
        """Workers to advise."""
        cores = self.cores / self.ranks
        return self.work.workers_advised(self.most_workers, cores, waits_outside=self.waits_outside)

    def figures(self) -> Figures:
        """Returns the figures of evidence by name, and those of words alone."""
        is_mostly_work = self.waits_for_core or self.cpu_frac >= BUILD_WAITS_FRAC
        return {
            "wait_frac": self.wait_frac,
            "build_ms": self.build_ms,
            "build_cpu_ms": self.build_cpu_ms,
            "cpu_frac": self.cpu_frac,
            "fed_step_ms": self.fed_ms,
            "num_workers": self.num_workers,
            "workers_needed": self.workers_needed,
            "cores": self.cores,
            "others_cores": self.others,
            "_about": "about " if self.is_estimate else "",
            "_spare": self.workers_advised > self.workers_needed,
            "_waits": not is_mostly_work,
        }

    def gain(self, workers: int, prefetch: int | None = None) -> Gain:
        """Predicts the gain of ``workers`` with ``prefetch`` batches each; None = the current number."""
        if workers > self.num_workers and self.contention is not None:
            return Gain(1.0, 1.0, 1.0)
        ahead, builds = prefetch or self.prefetch, self.builds or (self.build_ms,)
        mean_ms = self.build_cpu_ms if self.waits_for_core else self.build_ms

        def simulated(slack: float) -> npt.NDArray[np.float64]:
            scale = slack * mean_ms / max(float(np.mean(builds)), 1e-9)
            return simulated_steps(builds, scale, self.fed_ms, workers, ahead)

        factor = self.step_ms / max(self.work.period_ms(workers), float(np.mean(simulated(1.0))))
        low = 1.0
        if workers <= self.num_workers or self.cpu_frac >= BUILD_WAITS_FRAC or self.waits_for_core:
            shared_ms = 0.0 if self.waits_for_core or workers <= self.num_workers else self.build_ms - self.build_cpu_ms
            slowest_ms = float(np.quantile(simulated(_SLACK), 1 - _TAIL))
            low = self.step_ms / max(self.work.period_ms(workers, _SLACK), slowest_ms, shared_ms)
        factor = min(self.bound, max(1.0, factor))
        return Gain(factor, min(factor, max(1.0, low)), max(factor, self.bound))


@lru_cache(maxsize=64)
def simulated_steps(
    builds: tuple[float, ...], scale: float, fed_ms: float, workers: int, prefetch: int
) -> npt.NDArray[np.float64]:
    """Simulates runs with build times drawn from ``builds``; returns the mean milliseconds of a step in each run.

    As in torch's DataLoader, workers get batches in turn, and batches arrive in order. A batch is requested when the
    one ``workers * prefetch`` before it was taken.
    """
    ahead = workers * prefetch
    length = min(_MOST_SIMULATED, max(len(builds), 4 * ahead, 64))
    draw = np.random.default_rng(0)
    starts = draw.integers(len(builds), size=(length // _BLOCK + 1, 1, _REPLICATES))
    indices = (starts + np.arange(_BLOCK)[None, :, None]).reshape(-1, _REPLICATES)[:length] % len(builds)
    takes_ms = scale * np.asarray(builds)[indices]
    if not workers:
        return np.asarray(takes_ms.mean(axis=0) + fed_ms)
    free_at, taken_at = np.zeros((workers, _REPLICATES)), np.zeros((length, _REPLICATES))
    now = np.zeros(_REPLICATES)
    for step in range(length):
        worker = step % workers
        asked_at = taken_at[step - ahead] if step >= ahead else 0.0
        free_at[worker] = np.maximum(free_at[worker], asked_at) + takes_ms[step]
        taken_at[step] = now = np.maximum(now, free_at[worker])
        now = now + fed_ms
    first = min(ahead, length // 2)  # the queue fills at the start
    return np.asarray((now - taken_at[first]) / (length - first))


@once
def is_starved(evidence: Evidence) -> bool:
    """Returns whether steps wait for data long enough for a finding, and the ceiling does not contradict it."""
    factor = evidence.ceiling_factor
    if evidence.steps.num_measured < limits.FEWEST_STEPS or steady_wait_frac(evidence) <= limits.WAIT_FRAC:
        return False
    if factor is None or factor > limits.CEILING_FACTOR:
        return True
    found = contradiction(evidence.record)
    return found is not None and found.slower == "ceiling"


@once
def steady_wait_frac(evidence: Evidence) -> float:
    """Returns the share of time spent waiting, without the first steps of epochs, which may start workers."""
    steady = steady_steps(evidence)
    total = float(np.sum((evidence.steps.wait_ms + evidence.steps.rest_ms)[steady]))
    return float(np.sum(evidence.steps.wait_ms[steady])) / total if total > 0 else evidence.wait_frac


@once
def feeding_of(evidence: Evidence) -> Feeding | None:
    """Returns the feeding of a run; None if steps or batches were not timed."""
    steps, telemetry, loading, workers = (
        evidence.steps,
        evidence.telemetry,
        evidence.record.loading,
        evidence.num_workers,
    )
    if evidence.record.time is None or not steps.mean_ms:
        return None
    steady, cores = steady_steps(evidence), evidence.cores or 1.0
    step_ms = float(np.mean((steps.wait_ms + steps.rest_ms)[steady])) if steady.any() else steps.mean_ms
    wait_ms = steady_wait_frac(evidence) * step_ms
    fed_ms = max(step_ms - wait_ms, 1e-6)
    build_ms, cpu_frac, cpu_pct = loading.get("build_ms_mean"), loading.get("cpu_frac"), telemetry.mean("cpu_pct")
    if is_estimate := build_ms is None:  # while steps wait, each worker is always busy
        build_ms = workers * step_ms if workers else wait_ms
    if build_ms <= 0:
        return None
    of_step_ms = fed_ms * (1.0 if evidence.on_gpu else cores)
    loader_pct = telemetry.mean("loader_cpu_pct") if workers else None
    if cpu_frac is not None and not is_estimate:
        build_cpu_ms = cpu_frac * build_ms
    elif loader_pct is not None:
        build_cpu_ms = loader_pct / 100 * step_ms
    else:  # the training process uses what the step takes, the rest is building
        build_cpu_ms = build_ms if cpu_pct is None else max(0.0, cpu_pct / 100 * step_ms - of_step_ms)
    build_cpu_ms = min(build_ms, build_cpu_ms)
    others, factor = telemetry.mean_taken_cores, evidence.ceiling_factor
    doubt, bound = contradiction(evidence.record), step_ms / fed_ms
    if factor is not None and (doubt is None or doubt.slower != "ceiling"):
        bound = min(bound, factor)
    most_workers, batch_mib = loading.get("most_workers") or MOST_WORKERS, ready_mib(evidence, 1)
    if batch_mib:
        most_workers = int(min(most_workers, room_mib(evidence) / batch_mib))
    lock_pct = telemetry.mean("loader_lock_pct") or 0.0
    return Feeding(
        step_ms=step_ms,
        fed_ms=fed_ms,
        build_ms=build_ms,
        build_cpu_ms=build_cpu_ms,
        cpu_ms=build_cpu_ms + of_step_ms if cpu_pct is None else cpu_pct / 100 * step_ms,
        cores=cores,
        others=others or 0.0,
        num_workers=workers,
        most_workers=max(1, workers, min(most_workers, MOST_WORKERS)),
        bound=max(1.0, bound),
        is_estimate=is_estimate,
        lock_frac=min(1.0, lock_pct / 100 / workers) if workers else 0.0,
        # Without readings of other programs, these may have slowed building since.
        alone_ms=None if others is None else loading.get("build_ms_alone"),
        builds=tuple(steps.known("build_ms")[-_MOST_SIMULATED:].tolist()),
        prefetch=int(evidence.value("loader.prefetch_factor") or _PREFETCH),
        ranks=evidence.num_devices,
    )


def ready_mib(evidence: Evidence, workers: int, prefetch: int | None = None) -> float | None:
    """Returns the MiB of the batches that ``workers`` keep ready; None if a batch's size is unknown."""
    batch_mib = evidence.record.loading.get("batch_mib")
    prefetch = prefetch or evidence.value("loader.prefetch_factor") or _PREFETCH
    return None if batch_mib is None else workers * prefetch * batch_mib


def room_mib(evidence: Evidence) -> float:
    """Returns the MiB of host memory, and of /dev/shm between worker processes, that the batches of a rank may take."""
    machine = evidence.record.machine
    sizes = [size for size in (machine.get("ram_gib"), machine.get("shm_gib")) if size]
    return limits.MOST_READY_FRAC * min(sizes, default=float("inf")) * GIB / MIB / evidence.num_devices


def has_unused_fetch(evidence: Evidence) -> bool:
    """Returns whether the data can fetch whole batches, but torch's DataLoader requests single samples."""
    return evidence.value("loader.backend") == "torch" and evidence.record.loading.get("has_fetch", False)


def knobs(evidence: Evidence, **values: object) -> tuple[str, ...]:
    """Returns overrides of ``loader``, without those that the configuration of the run has. A user's own DataLoader
    keeps its backend. Empty for a loader that no knob can change."""
    asked = evidence.record.config.get("loader", {})
    if evidence.value("loader.backend") == "own":
        if "loader.num_workers" in evidence.record.refused:
            return ()
        values = {name: value for name, value in values.items() if name != "backend"}
    typed = {True: "true", False: "false", None: "null"}
    return tuple(
        f"loader.{name}={typed.get(value, value) if isinstance(value, bool | None) else value}"
        for name, value in values.items()
        if name not in asked or asked[name] != value
    )


def loader_change(evidence: Evidence, **values: object) -> dict[str, Any]:
    """Returns ``change`` of a finding by `knobs`. Without any, ``advice`` for the DataLoader that the user has made."""
    change = knobs(evidence, **values)
    settings = ", ".join(f"{name}={value}" for name, value in values.items() if name in OF_LOADER)
    return {"change": change} if change or not settings else {"advice": f"Give the DataLoader {settings}."}


def workers_take_cores(evidence: Evidence) -> bool:
    """Returns whether workers took CPU from the steps: all cores are full, and steps are slower than the ceiling."""
    feeding, doubt = feeding_of(evidence), contradiction(evidence.record)
    loader_pct = evidence.telemetry.mean("loader_cpu_pct") or 0.0
    if feeding is None or not feeding.num_workers or loader_pct < 100 * limits.LOADER_CPU_FRAC * feeding.cores:
        return False
    return feeding.is_cpu_full and doubt is not None and doubt.slower == "steps"


@once
def steady_steps(evidence: Evidence) -> npt.NDArray[np.bool_]:
    """Returns which steps are not the first of an epoch; all without workers, or without epochs in the table."""
    epochs = evidence.steps.column("epoch")
    if not evidence.num_workers or len(epochs) != len(evidence.steps.wait_ms):
        return np.ones(len(evidence.steps.wait_ms), bool)
    steady: npt.NDArray[np.bool_] = np.diff(epochs, prepend=epochs[:1]) == 0
    return steady
