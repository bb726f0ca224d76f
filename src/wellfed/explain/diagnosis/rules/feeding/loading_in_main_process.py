"""Finds steps that wait because the training process builds their batches itself."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.feeding import has_unused_fetch, knobs, planned_anew
from wellfed.explain.diagnosis.waiting import waiting_for
from wellfed.units import show_ms

_FETCH_FRAC = 0.1
"""Maximum time to fetch a whole batch over the time for its samples one by one (record loader_cpu)."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if there are no workers, and workers could build beside the step."""
    waiting = waiting_for(evidence, "loading_in_main_process")
    if waiting is None:
        return None
    feeding = waiting.feeding
    text = (
        f"{waiting.share_text}: the training process builds a batch itself in "
        f"{show_ms(feeding.build_ms)}, and a step takes {show_ms(feeding.fed_ms)}"
    )
    if has_unused_fetch(evidence) and not feeding.waits_outside:
        low = feeding.step_ms / (feeding.fed_ms + _FETCH_FRAC * feeding.build_ms)
        gain = Gain(feeding.bound, min(low, feeding.bound), feeding.bound)
        text += ". The data has fetch, which builds whole batches, but the loader requests single samples."
        change = planned_anew(evidence)
    else:
        advised = feeding.workers_advised
        gain = feeding.gain(advised)
        text += f"; {feeding.show_need()}, none is set.{feeding.show_doubt()}"
        change = knobs(evidence, backend="auto", num_workers=advised)
        if evidence.record.config.get("loader", {}).get("persistent_workers") is False:
            change += knobs(evidence, persistent_workers=True)
    return Finding("loading_in_main_process", text, feeding.figures(), change, gain=gain)
