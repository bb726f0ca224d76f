"""Finds host memory, or /dev/shm, that is full or nearly so."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.gains.feeding import knobs, ready_mib
from wellfed.explain.diagnosis.thresholds import MEMORY_FULL_FRAC
from wellfed.units import MIB, counted, show_bytes, show_gib


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the run ended for lack of host memory, or held nearly all of it."""
    record = evidence.record
    error, machine = record.error, record.machine
    rss = evidence.telemetry.curve("rss_gib")
    held = float(rss.max()) if len(rss) else record.host.get("rss_gib")
    shm, figures = record.host.get("shm_gib"), Figures()
    has_ended = error is not None and error["kind"] in ("host_oom", "worker")
    ram_gib, shm_gib = machine.get("ram_gib"), machine.get("shm_gib")
    is_full = bool(held and ram_gib and held >= MEMORY_FULL_FRAC * ram_gib)
    is_shm_full = bool(shm and shm_gib and shm >= MEMORY_FULL_FRAC * shm_gib)
    if not (has_ended or is_full or is_shm_full):
        return None
    text = []
    if error is not None and has_ended:
        was_killed = "Worker processes failed, mostly for lack of host memory or /dev/shm"
        text.append(was_killed if error["kind"] == "worker" else "The run ended for lack of host memory")
        figures["error"] = error["kind"]
    if held and ram_gib:
        text.append(f"the run held {show_gib(held)} of {show_gib(ram_gib)}")
        figures |= {"rss_gib": held, "ram_gib": ram_gib}
    if is_shm_full and shm and shm_gib:
        text.append(f"/dev/shm had {show_gib(shm)} of {show_gib(shm_gib)} in use")
        figures |= {"shm_used_gib": shm, "shm_gib": shm_gib}
    workers, prefetch = evidence.num_workers, evidence.value("loader.prefetch_factor") or 2
    ready = ready_mib(evidence, workers) if workers else None
    if workers:
        size = "" if ready is None else f", {show_bytes(ready * MIB)}"
        text.append(f"{counted(workers, 'worker')} keep {workers * prefetch} batches ready{size}")
    message = "; ".join(text)
    return Finding(
        "host_memory_full",
        f"{message[0].upper()}{message[1:]}. This is host memory, not the GPU's.",
        {**figures, "num_workers": workers},
        _changes(evidence, workers, prefetch),
        lost_frac=1.0 if has_ended else None,
    )


def _changes(evidence: Evidence, workers: int, prefetch: int) -> tuple[str, ...]:
    """Returns overrides for half the workers, and for fewer ready batches each."""
    if not workers or evidence.value("loader.backend") == "own":
        return ()
    fewer, less = max(1, workers // 2), max(1, prefetch // 2)
    change = knobs(evidence, num_workers=fewer) if fewer < workers else ()
    return (*change, *(knobs(evidence, prefetch_factor=less) if less < prefetch else ()))
