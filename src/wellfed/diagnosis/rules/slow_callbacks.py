"""Finds that the loop between two steps takes long, in which callbacks run and loggers write."""

from __future__ import annotations

import numpy as np

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.pauses import gain_of
from wellfed.diagnosis.rules import frequent_logging
from wellfed.diagnosis.run_tables import Series
from wellfed.diagnosis.thresholds import FEWEST_PAUSES, HOST_FRAC, HOST_MS
from wellfed.units import show_duration, show_percent

_LEAST_REGULAR = 0.8
"""Share of the long pauses that come the same number of steps after the one before."""


def check(evidence: Evidence) -> Finding | None:
    """Where it does at each step, or every so many; what comes without order is the machine's."""
    host_ms, step_ms = np.nan_to_num(evidence.column("host_ms")), evidence.step_ms
    if not len(host_ms) or not step_ms or frequent_logging.check(evidence) is not None:
        return None
    usual_ms, all_ms = float(np.median(host_ms)), step_ms * len(host_ms)
    every, long_ms = 1, usual_ms
    lost_ms = usual_ms * len(host_ms)
    if usual_ms < HOST_MS or lost_ms < HOST_FRAC * all_ms:
        typical_ms = float(np.sort(host_ms)[-min(FEWEST_PAUSES + 1, len(host_ms))])
        is_long = host_ms > max(HOST_MS, 5 * usual_ms, 0.5 * typical_ms)
        every = _distance(np.flatnonzero(is_long).astype(float))
        lost_ms = float(np.sum(host_ms[is_long] - usual_ms))
        if not every or lost_ms < HOST_FRAC * all_ms:
            return None
        long_ms = float(np.mean(host_ms[is_long]))
    frac, callbacks = lost_ms / all_ms, evidence.value("callbacks")
    often = "Between two steps" if every == 1 else f"Every {every} steps"
    who = f"callbacks ({callbacks})" if callbacks else "callbacks"
    return Finding(
        "slow_callbacks",
        f"{often} {show_duration(long_ms / 1e3)} pass before the next begins, {show_percent(frac)} of the time: {who}, "
        "loggers and hooks of the model run then. debug=profiler shows which.",
        {"host_frac": evidence.time["host_frac"] if evidence.time else frac, "host_ms": long_ms, "every_steps": every},
        gain=gain_of(frac, 0.5 * frac, frac),
    )


def _distance(places: Series) -> int:
    """Steps from one to the next, where nearly all are as far apart; else 0."""
    if len(places) <= FEWEST_PAUSES:
        return 0
    apart, times = np.unique(np.diff(places), return_counts=True)
    most = int(times.argmax())
    return int(apart[most]) if times[most] >= _LEAST_REGULAR * (len(places) - 1) and apart[most] > 1 else 0
