"""Finds steps that wait for single slow batches, while the workers are fast enough on average."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.feeding import knobs
from wellfed.explain.diagnosis.waiting import (
    CauseOfWaiting,
    has_slow_builds,
    latency_of,
    prefetch_needed,
    waiting_for,
    way_out_of_latency,
)
from wellfed.units import counted, show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if more batches kept ready would bridge the slow ones, or latency is random."""
    waiting = waiting_for(evidence, "uneven_batches")
    if waiting is None:
        return None
    feeding = waiting.feeding
    if has_slow_builds(evidence, feeding):
        return _latency(evidence, waiting)
    needed = prefetch_needed(evidence, feeding)
    p99_ms = float(np.nanquantile(evidence.steps.column("build_ms"), 0.99))
    text = (
        f"{waiting.share_text}, though {counted(feeding.num_workers, 'worker')} "
        f"that build a batch in {show_ms(feeding.build_ms)} keep up with steps of {show_ms(feeding.fed_ms)} on "
        f"average. The slowest batches take {show_ms(p99_ms)}. {needed} batches kept ready by each worker bridge "
        f"that; now it keeps {feeding.prefetch}."
    )
    figures = {**feeding.figures(), "build_ms_p99": p99_ms}
    change = knobs(evidence, prefetch_factor=needed)
    return Finding("uneven_batches", text, figures, change, gain=feeding.gain(feeding.num_workers, needed))


def _latency(evidence: Evidence, waiting: CauseOfWaiting) -> Finding:
    """Returns the finding for batches that are far too late, with other samples each time."""
    feeding, (latency, of_latency, lost_frac) = waiting.feeding, latency_of(evidence, waiting)
    text, figures = f"{latency}: {_of_samples(evidence)}", {**feeding.figures(), **of_latency}
    found = way_out_of_latency(evidence, feeding)
    if found is None:
        text += " No queue that fits into memory bridges that: make the slowest reads faster."
        return Finding("uneven_batches", text, figures, lost_frac=lost_frac)
    workers, prefetch = found
    text += " Batches kept ready bridge some of that."
    ahead = {} if feeding.num_workers else {"backend": "auto"}
    change = knobs(evidence, **ahead, num_workers=workers, prefetch_factor=prefetch)
    return Finding("uneven_batches", text, figures, change, gain=feeding.gain(workers, prefetch))


def _of_samples(evidence: Evidence) -> str:
    """Returns what the record shows of the samples in the slow batches, as text."""
    epochs, index = evidence.steps.column("epoch"), evidence.steps.column("slowest_index")
    if len(index) and np.isfinite(index).any():
        if len(np.unique(epochs[np.isfinite(epochs)])) > 1:
            return "random latency, as the samples of one epoch's slow batches were not slow in another."
        return "random latency, or slow samples; each was read once, so a second epoch is needed to know."
    return "random latency, or slow samples; which samples were slow is not recorded of whole batches."
