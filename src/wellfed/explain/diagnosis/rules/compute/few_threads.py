"""Notes steps on the CPU that compute with few of its cores."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.thresholds import IDLE_CORES, WORKS_FRAC
from wellfed.units import counted


def check(evidence: Evidence) -> Finding | None:
    """Returns a note if torch has at most half of the cores, and others idle while steps compute."""
    process, cores, cpu_pct = evidence.record.process, evidence.cores, evidence.telemetry.mean("cpu_pct")
    if process is None or cores is None or cpu_pct is None or evidence.on_gpu or evidence.record.time is None:
        return None
    threads, own = process["torch_threads"], (cpu_pct - (evidence.telemetry.mean("loader_cpu_pct") or 0.0)) / 100
    idle = cores - cpu_pct / 100 - (evidence.telemetry.mean_taken_cores or 0.0)
    works = evidence.record.time["compute_frac"] >= WORKS_FRAC and own >= WORKS_FRAC * threads
    if threads > cores / 2 or idle < IDLE_CORES or not works:
        return None
    text = (
        f"The steps compute on the CPU with {counted(threads, 'thread')}, and {idle:.1f} of {cores:g} cores stood "
        "idle. The number is torch.set_num_threads in the code, or OMP_NUM_THREADS. More threads make large "
        "operations faster, and small ones slower: measure it."
    )
    return Finding("few_threads", text, {"torch_threads": threads, "idle_cores": idle}, is_note=True)
