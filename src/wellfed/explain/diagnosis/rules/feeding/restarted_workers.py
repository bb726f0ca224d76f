"""Finds that each epoch waits for its worker processes to start, or to have a first batch ready."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.feeding import has_unused_fetch
from wellfed.explain.diagnosis.gains.pauses import gain_of, pauses
from wellfed.explain.diagnosis.thresholds import PAUSE_FRAC
from wellfed.units import counted, show_duration, show_percent

_FEWEST_STARTS = 3


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the first batches of epochs are late by at least `PAUSE_FRAC` of the time. Either the
    workers are started anew, or they begin with nothing ready, and the data could be fetched without them."""
    stays = evidence.value("loader.persistent_workers") is not False
    if evidence.num_workers == 0 or (stays and not has_unused_fetch(evidence)):
        return None
    starts = np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    wall_ms = (evidence.steps.mean_ms or 0.0) * len(evidence.steps.wait_ms) + float(evidence.steps.gap_ms.sum())
    if len(starts) < _FEWEST_STARTS or not wall_ms or evidence.value("loader.backend") in ("threads", "inline"):
        return None
    usual_ms = float(np.median(np.delete(evidence.steps.wait_ms, starts)))
    waited_ms = max(0.0, float(np.median(evidence.steps.wait_ms[starts])) - usual_ms)
    stopped_ms = max(0.0, float(np.median(evidence.steps.gap_ms[starts])) - _other_pauses_ms(evidence, len(starts) + 1))
    start_ms = waited_ms + stopped_ms
    frac = start_ms * len(starts) / wall_ms
    if frac < PAUSE_FRAC:
        return None
    # The first batch has to be built in any case.
    kept_frac = min(1.0, (evidence.record.loading.get("build_ms_mean") or 0.1 * start_ms) / start_ms) * frac
    is_own = evidence.value("loader.backend") == "own"
    begin = "Workers begin each epoch with nothing ready" if stays else "Workers are started anew for each epoch"
    length = evidence.swings.lags.get("epoch", 0)
    text = (
        f"{begin}: its first step comes {show_duration(start_ms / 1e3)} late, "
        f"{show_percent(frac)} of the time at {counted(len(starts), 'start')} of {length} steps."
    )
    if stays:
        text += " The data has fetch, which builds whole batches, but the loader requests single samples."
    return Finding(
        "restarted_workers",
        f"{text}{' Give the DataLoader persistent_workers=True.' if is_own else ''}",
        {"restart_frac": frac, "late_ms": start_ms, "epochs_begun": len(starts)},
        () if is_own else ("loader=auto",) if stays else ("loader.persistent_workers=true",),
        gain=gain_of(frac - kept_frac, 0.5 * (frac - kept_frac), frac),
    )


def _other_pauses_ms(evidence: Evidence, epochs: int) -> float:
    """Returns the milliseconds of validations and checkpoints at the end of an epoch."""
    total_s = 0.0
    for phase, knob in (("validate", "validate_every_steps"), ("checkpoint", "checkpoint_every_steps")):
        spent = pauses(evidence, phase)
        if spent is None:
            continue
        if not evidence.value(f"trainer.{knob}"):
            total_s += spent.total_s
        elif evidence.record.wall is None:  # a watched script, where one may be at each end, and the knob is an average
            total_s += min(spent.total_s, epochs * spent.each_s)
    return 1e3 * total_s / epochs
