"""Finds steps that wait because too few workers build batches."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.feeding import knobs
from wellfed.explain.diagnosis.waiting import waiting_for
from wellfed.units import show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if more workers would build batches faster."""
    waiting = waiting_for(evidence, "too_few_workers")
    if waiting is None:
        return None
    feeding = waiting.feeding
    advised, workers = feeding.workers_advised, feeding.num_workers
    about = "about " if feeding.is_estimate else ""
    text = (
        f"{waiting.share_text}: one worker builds a batch in "
        f"{about}{show_ms(feeding.build_ms)}, a step takes {show_ms(feeding.fed_ms)}; {feeding.show_need()}, "
        f"{workers} {'is' if workers == 1 else 'are'} set."
    )
    if feeding.step_ms_with(advised) > 1.1 * feeding.fed_ms:
        text += f" Then all {feeding.cores:g} cores are full, and steps still wait."
    if (swing := evidence.swings.describe_steps("loader.num_workers")) is not None:
        text += f" {swing}"
    text += feeding.show_doubt()
    own = {"backend": "auto"} if evidence.value("loader.backend") == "own" else {}
    change = knobs(evidence, **own, num_workers=advised)
    return Finding("too_few_workers", text, feeding.figures(), change, gain=feeding.gain(advised))
