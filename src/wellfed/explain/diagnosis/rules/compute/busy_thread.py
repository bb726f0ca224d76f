"""Finds Python threads of the training process that work beside the steps."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.thresholds import BUSY_THREAD_CORES
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one thread takes a large part of a core while steps run."""
    process = evidence.record.process
    busy = [one for one in (process["busy_threads"] if process else []) if one["cores"] >= BUSY_THREAD_CORES]
    if not busy:
        return None
    first = max(busy, key=lambda one: one["cores"])
    more = f" {len(busy) - 1} more threads are as busy." if len(busy) > 1 else ""
    most = min(1.0, first["cores"])
    text = (
        f"The thread {first['name']!r} of the training process took {first['cores']:.2f} cores during training.{more} "
        "Python runs one thread at a time, so the steps stand still while it runs Python code: up to "
        f"{show_percent(most)} of the time. Do its work in another process, or between epochs."
    )
    figures: Figures = {"thread": first["name"], "thread_cores": first["cores"], "busy_threads": len(busy)}
    return Finding("busy_thread", text, figures, lost_frac=0.5 * most)
