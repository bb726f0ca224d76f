"""Finds workers that wait for one another, or for a shared limit, while they build batches."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.thresholds import CONTENTION_FACTOR
from wellfed.explain.diagnosis.waiting import waiting_for
from wellfed.units import show_factor, show_ms, show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if a batch takes far longer beside other workers than with one worker alone.

    That was timed before training, or workers were seen to wait for a lock that they share.
    """
    waiting = waiting_for(evidence, "contended_loading")
    if waiting is None or waiting.feeding.contention is None:
        return None
    feeding, factor = waiting.feeding, waiting.feeding.contention
    figures: Figures = {**feeding.figures(), "contention_factor": factor}
    if feeding.lock_factor >= CONTENTION_FACTOR:
        text = (
            f"{waiting.share_text}. Its {feeding.num_workers} workers wait for one another: each of them waits for a "
            f"lock that they share for {show_percent(feeding.lock_frac)} of the time. More workers don't help. Read "
            "without the lock, such as by a file that each worker opens."
        )
        figures["lock_frac"] = feeding.lock_frac
        return Finding("contended_loading", text, figures, lost_frac=waiting.frac)
    is_thread = evidence.value("loader.backend") == "threads"
    first = "Python's own lock, as they are threads" if is_thread else "a lock in the dataset"
    text = (
        f"{waiting.share_text}. Beside {feeding.num_workers} workers a batch takes "
        f"{show_ms(feeding.build_ms)} to build, {show_factor(factor)} times as long as one worker alone took, and "
        f"{show_percent(feeding.cpu_frac)} of that is CPU time. The workers wait for one another: {first}, "
        "a rate limit, or a store at its limit. More workers don't help. Read without the lock, in larger "
        "requests, or from a local copy."
    )
    figures["build_ms_alone"] = feeding.alone_ms or 0.0
    return Finding("contended_loading", text, figures, lost_frac=waiting.frac)
