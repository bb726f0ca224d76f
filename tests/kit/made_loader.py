"""Simulates a training loop and its workers, event by event, with planted causes of waiting.

Shares no formula with the diagnosis: the same seed with another number of workers gives the true gain.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.evidence import Evidence

CORES = 4


@dataclass(frozen=True)
class Kind:
    """The work of building a batch.

    Args:
        cpu_ms, wait_ms, locked_ms: work of a core; waiting beside others; waiting while no other worker does.
        every_ms: a rate limit lets one batch pass in this time, after ``burst`` at once.
        tail: draws the factor of a batch's ``cpu_ms`` and ``wait_ms``; mean 1.
    """

    cpu_ms: float = 0.0
    wait_ms: float = 0.0
    locked_ms: float = 0.0
    every_ms: float = 0.0
    burst: int = 1
    tail: Callable[[np.random.Generator], float] = lambda draw: 1.0

    @property
    def alone_ms(self) -> float:
        """Time to build a batch alone, as before training."""
        return self.cpu_ms + self.wait_ms + self.locked_ms


def log_normal(sigma: float) -> Callable[[np.random.Generator], float]:
    """Returns a factor whose logarithm is normally distributed."""
    return lambda draw: float(np.exp(sigma * draw.standard_normal() - sigma**2 / 2))


def one_in(number: int, times: float) -> Callable[[np.random.Generator], float]:
    """Returns a factor by which one batch in ``number`` takes ``times`` as long."""
    mean = 1 + (times - 1) / number
    return lambda draw: (times if draw.random() < 1 / number else 1.0) / mean


@dataclass
class Build:
    """A batch that a worker builds: the work that is left, and when it began."""

    number: int
    begun_ms: float
    left: list[tuple[str, float]]


def simulate(
    kind: Kind, workers: int, *, step_ms: float, steps: int = 300, prefetch: int = 2, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns wait, build time and CPU time of the build for each step, in milliseconds."""
    draw = np.random.default_rng(seed)
    factors = [kind.tail(draw) for _ in range(steps)]
    waits, builds, cpus = np.zeros(steps), np.zeros(steps), np.zeros(steps)

    def phases(number: int) -> list[tuple[str, float]]:
        cpus[number] = kind.cpu_ms * factors[number]
        gate = [("gate", 0.0)] if kind.every_ms else []
        return [*gate, ("wait", kind.wait_ms * factors[number]), ("lock", kind.locked_ms), ("cpu", cpus[number])]

    if not workers:
        now, gate_ms = 0.0, 0.0
        for step in range(steps):
            gate_ms = max(gate_ms, now) + kind.every_ms
            builds[step] = waits[step] = sum(ms for _, ms in phases(step)) + max(0.0, gate_ms - kind.every_ms - now)
            now += waits[step] + step_ms
        return waits, builds, cpus

    queues: list[deque[int]] = [deque() for _ in range(workers)]
    building: list[Build | None] = [None] * workers
    locked: deque[int] = deque()
    passed: deque[float] = deque([0.0] * kind.burst)
    ready: set[int] = set()
    asked, now, wanted, stepping_until, waiting_since = 0, 0.0, 0, 0.0, 0.0
    while wanted < steps:
        while asked < steps and asked < wanted + workers * prefetch:
            queues[asked % workers].append(asked)
            asked += 1
        for worker in range(workers):
            if building[worker] is None and queues[worker]:
                number = queues[worker].popleft()
                left = phases(number)
                if kind.every_ms:  # it may pass when its turn has come
                    turn_ms = max(now, passed.popleft() + kind.every_ms * kind.burst)
                    passed.append(turn_ms)
                    left[0] = ("wait", turn_ms - now)
                building[worker] = Build(number, now, left)
        for worker, build in enumerate(building):
            while build is not None and build.left and build.left[0][1] <= 1e-9:
                if build.left[0][0] == "lock" and worker in locked:
                    locked.remove(worker)
                build.left.pop(0)
            if build is not None and not build.left:
                builds[build.number] = now - build.begun_ms
                ready.add(build.number)
                building[worker] = None
                continue
            if build is not None and build.left[0][0] == "lock" and worker not in locked:
                locked.append(worker)
        if now >= stepping_until - 1e-9 and wanted in ready:
            waits[wanted] = now - waiting_since
            stepping_until = waiting_since = now + step_ms
            wanted += 1
            continue
        if any(one is None and queue for one, queue in zip(building, queues, strict=True)):
            continue
        at_cpu = sum(build is not None and build.left[0][0] == "cpu" for build in building)
        speed = min(1.0, CORES / at_cpu) if at_cpu else 1.0
        until = [stepping_until - now] if stepping_until > now + 1e-9 else []
        active: list[tuple[Build, float]] = []
        for worker, build in enumerate(building):
            if build is None or (build.left[0][0] == "lock" and locked[0] != worker):
                continue
            rate = speed if build.left[0][0] == "cpu" else 1.0
            active.append((build, rate))
            until.append(build.left[0][1] / rate)
        passes = min(until)
        now += passes
        for build, rate in active:
            what, left_ms = build.left[0]
            build.left[0] = (what, left_ms - passes * rate)
    return waits, builds, cpus


def evidence_of_made(kind: Kind, workers: int, *, step_ms: float, seed: int = 0, **more: Any) -> Evidence:
    """Returns what a run with such a loader records on a GPU, without the first steps, in which the queue fills."""
    waits, builds, cpus = (found[40:] for found in simulate(kind, workers, step_ms=step_ms, seed=seed))
    return fed_by(
        workers,
        build_ms=builds,
        step_ms=step_ms - 0.1,
        wait_ms=waits,
        cpu_frac=float(cpus.sum() / builds.sum()),
        cores=float(CORES),
        cpu_pct=100 * float((cpus + 0.2).sum() / (waits + step_ms).sum()),
        on_gpu=True,
        steps=len(waits),
        loading={"build_ms_alone": kind.alone_ms},
        **more,
    )


def true_step_ms(kind: Kind, workers: int, *, step_ms: float, prefetch: int = 2, seed: int = 0) -> float:
    """Returns the mean time of a step, without the first steps."""
    waits, _, _ = simulate(kind, workers, step_ms=step_ms, prefetch=prefetch, seed=seed)
    return float(waits[40:].mean()) + step_ms
