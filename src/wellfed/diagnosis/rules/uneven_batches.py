"""Finds steps that wait for single slow batches, while the workers are fast enough on average."""

from __future__ import annotations

import numpy as np

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.feeding import knobs
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.waiting import cause_of_waiting, prefetch_needed
from wellfed.units import counted, show_ms, show_percent


def check(evidence: Evidence) -> Finding | None:
    """Where more batches kept ready would bridge the slow ones."""
    waiting = cause_of_waiting(evidence)
    if waiting is None or waiting.cause != "uneven_batches":
        return None
    feeding, needed = waiting.feeding, prefetch_needed(evidence, waiting.feeding)
    p99_ms = float(np.nanquantile(evidence.column("build_ms"), 0.99))
    now = evidence.value("loader.prefetch_factor") or 2
    said = (
        f"{show_percent(waiting.frac)} of each step waits for data, though {counted(feeding.num_workers, 'worker')} "
        f"that build a batch in {show_ms(feeding.build_ms)} keep up with steps of {show_ms(feeding.fed_ms)} on "
        f"average: the slowest batches take {show_ms(p99_ms)}. {needed} kept ready by each worker bridge "
        f"that; now it is {now}."
    )
    figures = {**feeding.figures(), "build_ms_p99": p99_ms}
    change = knobs(evidence, prefetch_factor=needed)
    return Finding("uneven_batches", said, figures, change, gain=feeding.gain(feeding.num_workers, needed))
