"""Finds steps that wait while each batch is transferred from the worker process that built it in time."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.feeding import knobs
from wellfed.explain.diagnosis.waiting import handover_ms, waiting_for
from wellfed.units import counted, show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if workers are fast enough, and each step waits about equally long for a ready batch."""
    waiting = waiting_for(evidence, "slow_handover")
    if waiting is None:
        return None
    feeding, taken_ms = waiting.feeding, handover_ms(evidence)
    text = (
        f"{waiting.share_text}, though {counted(feeding.num_workers, 'worker')} "
        f"that build a batch in {show_ms(feeding.build_ms)} keep up: receiving a batch from a worker process takes "
        f"{show_ms(taken_ms)} of a step of {show_ms(feeding.step_ms)}"
    )
    figures = {**feeding.figures(), "handover_ms": taken_ms}
    if evidence.record.loading.get("has_fetch"):
        return Finding(
            "slow_handover",
            f"{text}. The data has fetch, so threads can build whole batches in this process.",
            figures,
            knobs(evidence, backend="threads"),
            gain=feeding.gain(feeding.num_workers),
        )
    text += ". Batches of fewer and larger tensors arrive faster. With a fetch in the data, threads avoid this."
    return Finding("slow_handover", text, figures, lost_frac=waiting.frac)
