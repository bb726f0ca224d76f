"""Finds steps that wait because building their batches needs more CPU than there is."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.feeding import Feeding, has_unused_fetch, planned_anew
from wellfed.explain.diagnosis.waiting import waiting_for
from wellfed.units import show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if more workers would only share the same cores."""
    waiting = waiting_for(evidence, "cpu_bound_loading")
    if waiting is None:
        return None
    feeding = waiting.feeding
    text = (
        f"{waiting.share_text}: building a batch takes "
        f"{show_ms(feeding.build_cpu_ms)} of CPU, a step takes {show_ms(feeding.fed_ms)}"
    )
    change: tuple[str, ...] = ()
    gain = None
    if has_unused_fetch(evidence):
        text += ". The data has fetch, which builds whole batches, but the loader requests single samples."
        change = planned_anew(evidence)
        gain = Gain(feeding.bound, 1.0, feeding.bound)
    else:
        text += (
            f", and {_cores(feeding)}: more workers would only share them. Make it cheaper: fetch "
            "for whole batches, augmentation in on_device, what is the same in each epoch prepared once. Store or "
            "decode pictures at the size that is used (a JPEG in Pillow's draft mode)."
        )
    return Finding("cpu_bound_loading", text, feeding.figures(), change, gain=gain, lost_frac=waiting.frac)


def _cores(feeding: Feeding) -> str:
    text = "the one core is full" if feeding.cores == 1 else f"all {feeding.cores:g} cores are full"
    return text if feeding.others < 0.1 * feeding.cores else f"{text} ({feeding.others:.1f} of them with others' work)"
