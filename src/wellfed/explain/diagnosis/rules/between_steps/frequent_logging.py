"""Finds that figures are logged too often, so that steps wait for it."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.pauses import gain_of, rarer
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import FEWEST_PAUSES, HOST_MS, PAUSE_FRAC
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.units import show_duration, show_percent

_KNOB = "trainer.log_every_steps"
_WANTED_FRAC = 0.01
"""Acceptable share of the wall time."""
_MOST_OTHERS = 0.5
"""Maximum ratio of equally long steps that do not log to those that do."""
_USUAL = 50


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if steps that log are followed by longer gaps, or by long gaps if all steps log."""
    every, step_ms, host_ms = int(evidence.value(_KNOB) or 0), evidence.steps.mean_ms, evidence.steps.column("host_ms")
    if not every or not step_ms or not len(host_ms):
        return None
    behind_ms, others_ms = _behind_rows(evidence, every)
    if len(behind_ms) < FEWEST_PAUSES:
        return None
    row_ms, frac = float(np.mean(behind_ms)), float(np.sum(behind_ms)) / (step_ms * len(host_ms))
    # A row fetches its figures from the device, which idles until the host is ahead again.
    found = contradiction(evidence.record)
    is_loop_slow = every == 1 and found is not None and found.slower == "loop"
    # Rejects a few slow rows, and delays that other steps have, too.
    is_of_rows = is_loop_slow or np.median(behind_ms) >= (HOST_MS if every == 1 else 0.5 * row_ms)
    if frac < PAUSE_FRAC or not is_of_rows or np.sum(others_ms > 0.5 * row_ms) > _MOST_OTHERS * len(behind_ms):
        return None
    hook, hook_frac = _costliest_hook(evidence)
    if every == 1 and hook_frac >= 0.5 * frac:  # the hook is the cause
        return None
    wanted = max(_USUAL, rarer(every, frac / _WANTED_FRAC))
    factor = evidence.ceiling_factor or 1.0
    won_frac = frac * (1 - every / wanted)
    text = f"Every {every} steps figures are logged" if every > 1 else "Figures are logged at each step"
    return Finding(
        "frequent_logging",
        f"{text}, and the loop stands still for {show_duration(row_ms / 1e3)} then: {show_percent(frac)} of the "
        f"time.{f' {hook} takes part in it.' if hook_frac >= 0.1 * frac else ''}",
        {"logging_frac": frac, "row_ms": row_ms, "every_steps": every},
        (f"{_KNOB}={wanted}",),
        gain=Gain(factor, 1.0, factor)  # the ceiling's steps log nothing, but also lack other work
        if is_loop_slow
        else gain_of(won_frac, 0.7 * won_frac if every > 1 else 0.0, frac),
    )


def _costliest_hook(evidence: Evidence) -> tuple[str, float]:
    """Returns the costliest hook at the end of steps, and its share of the time of all steps."""
    wall = evidence.record.wall
    hooks = {name: s for name, s in (wall["callbacks"] if wall else {}).items() if name.endswith("on_train_batch_end")}
    if wall is None or not hooks:
        return "", 0.0
    name = max(hooks, key=lambda one: hooks[one])
    return name, hooks[name] / max(1e-9, wall["steps_s"] + hooks_within_steps_s(wall))


def _behind_rows(evidence: Evidence, every: int) -> tuple[Series, Series]:
    """Returns the excess time after steps that logged, and after other steps, without steps before a pause."""
    host_ms, steps = np.nan_to_num(evidence.steps.column("host_ms")), evidence.steps.column("step")
    known = evidence.steps.gap_ms < 0.1 * float(evidence.steps.mean_ms or 0.0)
    if not len(known) == len(host_ms) == len(steps):  # a damaged table lacks a column
        return host_ms[:0], host_ms[:0]
    logged = ((steps - 1) % every == 0) & (steps > 1)
    if every == 1:
        return host_ms[known], host_ms[:0]
    others_ms = host_ms[known & ~logged]
    usual_ms = np.median(others_ms) if len(others_ms) else 0.0
    return host_ms[known & logged] - usual_ms, others_ms - usual_ms
