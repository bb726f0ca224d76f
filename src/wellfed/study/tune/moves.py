"""Lists what else may help where findings are silent, beginning with the largest share of the time.

A move sets knobs of the loader, the memory or compiling, none that changes what is learned. Its bound is the largest
possible gain by the last trial's shares of time. Moves that can't win a few percent are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from wellfed.data.worker_count import BUILD_WAITS_FRAC
from wellfed.explain.diagnosis.thresholds import CEILING_FACTOR
from wellfed.plan.backend import MESSAGE_MS
from wellfed.study.tune.trial import TuneTrial
from wellfed.units import show_percent

_PREFETCH, _DEVICE_PREFETCH = 8, 4
_BACKEND = "loader.backend"
_LEFT = ("prefetch_factor", "persistent_workers", "pin_memory", "device_prefetch")
"""Knobs that belong to a backend; the plan decides them for each."""
_OTHERS = {
    "inline": ("threads", "processes"),
    "torch": ("threads", "processes", "inline"),
    "threads": ("inline", "processes"),
    "processes": ("threads", "inline"),
}
"""Other backends to try, the most promising first."""
_COMPILED_FRAC = 0.5
"""Largest share of a step's compute time that compiling may save."""
_RECOMPUTED = 1.5
"""Largest factor by which computing activations twice lengthens a step: forward is at most a third of it."""
_UNKNOWN_BOUND = 2.0
"""Bound of a move that no share of the time bounds."""
_MICRO_BATCHES = 4
"""Micro-batches of a step whose activations fit the caches of a CPU (``memory=accumulate``)."""


@dataclass(frozen=True)
class TuneMachine:
    """Facts of the machine that runs the trials."""

    cores: float
    """Cores for all devices together."""
    on_gpu: bool


@dataclass(frozen=True)
class Move:
    """Overrides worth a trial."""

    kind: Literal["data", "step", "compile"]
    """data: how batches are built; step: memory of a step."""
    settings: tuple[str, ...]
    because: str
    bound: float
    """Largest factor by which it could be better."""


def moves(best: TuneTrial, machine: TuneMachine, *, backends_are_timed: bool = False) -> Iterator[Move]:
    """Yields what to try from the best configuration so far, the most promising first.

    Args:
        backends_are_timed: the plan of this trial or of another has timed the first batches with each backend.
    """
    yield from _features(best)
    of_data, of_steps = list(_loader(best, machine, backends_are_timed)), list(_steps(best, machine))
    yield from (*of_data, *of_steps) if _data_frac(best) >= _step_frac(best) else (*of_steps, *of_data)
    yield from _compiled(best)


def _data_frac(best: TuneTrial) -> float:
    """Returns the share of a step that waits for its batch, or for its copy to the device."""
    time = best.record.time
    return 0.0 if time is None else time["wait_frac"] + (time["copy_frac"] or 0.0)


def _step_frac(best: TuneTrial) -> float:
    time = best.record.time
    return 0.0 if time is None else time["compute_frac"] + time["host_frac"]


def _of_waiting(best: TuneTrial) -> float:
    """Returns the possible gain if batches were always ready."""
    return 1 / max(1 - _data_frac(best), 0.01)


def _of_data(best: TuneTrial) -> float:
    """Returns the possible gain if feeding the step cost nothing, cores of the CPU included."""
    ceiling = best.ceiling_factor or 1.0
    return max(_of_waiting(best), ceiling if ceiling > CEILING_FACTOR else 1.0)


def _loader(best: TuneTrial, machine: TuneMachine, backends_are_timed: bool) -> Iterator[Move]:
    backend, workers = best.value("loader.backend"), int(best.value("loader.num_workers") or 0)
    if backend is None or "loader.num_workers" in best.record.refused:
        return
    bound, of_waiting = _of_data(best), _of_waiting(best)
    why = f"{show_percent(_data_frac(best))} of a step waits for data"
    if best.ceiling_factor is not None:
        why += f", and the ceiling is {best.ceiling_factor:.2f} times the rate"
    has_fetch, most = best.record.loading.get("has_fetch", False), best.record.loading.get("most_workers") or 64
    cores = max(1, int(machine.cores / int(best.value("trainer.devices") or 1)))
    spare = min(max(1, cores - 1), most)
    is_any_set = any(best.asked(f"loader.{knob}") is not None for knob in ("num_workers", *_LEFT))
    is_own = backend == "own"
    if is_any_set or (best.is_from(_BACKEND, "set") and not is_own):
        yield Move("data", built_by("auto", None), f"{why}: left to the plan, which times the first batches", bound)
    others = _OTHERS.get(str(backend), ())
    for other in others[:1] if backends_are_timed else others:
        if other == "threads" and not has_fetch:
            continue
        is_cheap = best.record.loading.get("build_ms_p50", MESSAGE_MS) < MESSAGE_MS
        if other == "processes" and is_cheap and not machine.on_gpu:
            continue
        by = "in the training process" if other == "inline" else f"by {other}"
        count = None if other == "inline" else workers or spare
        yield Move("data", built_by(other, count), f"{why}: built {by}", bound)
    if workers or is_own:
        waits_outside = best.record.loading.get("cpu_frac", 1.0) < BUILD_WAITS_FRAC
        for count in (*((2 * workers, 4 * workers) if waits_outside else ()), spare, cores, max(1, workers // 2)):
            if count != workers and count <= most:
                win = of_waiting if count > workers else bound
                yield Move("data", (f"loader.num_workers={count}",), f"{why}: another number of workers", win)
        if workers and int(best.value("loader.prefetch_factor") or 2) < _PREFETCH:
            yield Move("data", (f"loader.prefetch_factor={_PREFETCH}",), f"{why}: more batches kept ready", of_waiting)
    if machine.on_gpu:
        if best.value("loader.pin_memory") is False:
            settings = ("loader.pin_memory=true",)
            yield Move("data", settings, f"{why}: page-locked memory is copied beside it", of_waiting)
        can_copy_ahead = workers or (has_fetch and backend != "torch")
        if can_copy_ahead and int(best.value("loader.device_prefetch") or 0) < _DEVICE_PREFETCH:
            settings = (f"loader.device_prefetch={_DEVICE_PREFETCH}",)
            yield Move("data", settings, f"{why}: more batches copied ahead", of_waiting)


def built_by(backend: str, workers: int | None) -> tuple[str, ...]:
    """Returns the overrides of a backend that leave its knobs to the plan."""
    count = "null" if workers is None else workers
    return (f"{_BACKEND}={backend}", f"loader.num_workers={count}", *(f"loader.{knob}=null" for knob in _LEFT))


def _features(best: TuneTrial) -> Iterator[Move]:
    """Yields keeping frozen features, which saves the step an encoder or the loader its batches."""
    features = best.value("memory.features")
    if features in ("dynamic", "cache_host"):
        kept = "null" if best.is_from("memory.features", "set") else "cache"
        why = f"memory.features={features}: frozen features kept rather than computed or sent anew"
        yield Move("step", (f"memory.features={kept}",), why, _UNKNOWN_BOUND)


def _steps(best: TuneTrial, machine: TuneMachine) -> Iterator[Move]:
    """Yields ways to spend memory for a faster step."""
    why = f"{show_percent(_step_frac(best))} of the time is in the step itself"
    bound = 1 / max(1 - _step_frac(best), 0.05)
    if best.value("memory.checkpoint_activations") is True:
        kept = ("memory.checkpoint_activations=null",)
        yield Move("step", kept, f"{why}: activations kept", min(bound, _RECOMPUTED))
    accumulate = int(best.value("memory.accumulate") or 1)
    if accumulate > 1:
        yield Move(
            "step", ("memory.accumulate=1", "memory.micro_batch=null"), f"{why}: steps that are not split", bound
        )
    elif not machine.on_gpu:
        settings = (f"memory.accumulate={_MICRO_BATCHES}", "memory.micro_batch=null")
        yield Move("step", settings, f"{why}: parts that the caches of the CPU hold", min(bound, _UNKNOWN_BOUND))


def _compiled(best: TuneTrial) -> Iterator[Move]:
    """Yields compiling, which comes last: it costs seconds to minutes at the start."""
    is_typed = any(setting.startswith("gpu.compile=") for setting in best.record.overrides)
    if best.value("gpu.compile") == "none" and not is_typed:
        bound = 1 / (1 - _COMPILED_FRAC * min(_step_frac(best), 1.0))
        yield Move(
            "compile",
            ("gpu.compile=default",),
            f"{show_percent(_step_frac(best))} of the time computes: compiled",
            bound,
        )
