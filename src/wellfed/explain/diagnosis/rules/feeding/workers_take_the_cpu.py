"""Finds workers, or their threads, that take the cores which the steps need."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.feeding import feeding_of, knobs, workers_take_cores
from wellfed.explain.diagnosis.waiting import cause_of_waiting
from wellfed.units import counted, show_ms, show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if all cores are full, and steps are slowed down or workers have many threads."""
    waiting, feeding = cause_of_waiting(evidence), feeding_of(evidence)
    is_waiting = waiting is not None and waiting.cause == "workers_take_the_cpu"
    if feeding is None or not (is_waiting or workers_take_cores(evidence)):
        return None
    cores, threads = evidence.cores or 1.0, int(evidence.value("loader.worker_threads") or 1)
    workers, fewer = feeding.num_workers, max(1, int(cores) - 1)
    ceiling, loader_pct = evidence.ceiling_factor, evidence.telemetry.mean("loader_cpu_pct")
    top = max(1.0, feeding.step_ms / feeding.fed_ms if ceiling is None else ceiling)
    text = f"{counted(workers, 'worker')} of {counted(threads, 'thread')} share {cores:g} cores with the steps"
    if loader_pct is not None:
        text += f" and take {show_percent(loader_pct / 100 / cores)} of them"
    if ceiling is not None:
        text += f": a step takes {show_ms(feeding.step_ms)}, and {show_ms(feeding.step_ms / ceiling)} in the ceiling"
    fewer_threads = knobs(evidence, worker_threads=1) if threads > 1 else ()
    change = (*fewer_threads, *(knobs(evidence, num_workers=fewer) if workers > fewer else ()))
    figures = {**feeding.figures(), "worker_threads": threads}
    lost_frac = 1 - 1 / top
    gain = Gain(top, 1.0, top) if change else None
    return Finding("workers_take_the_cpu", f"{text}.", figures, change, gain=gain, lost_frac=lost_frac)
