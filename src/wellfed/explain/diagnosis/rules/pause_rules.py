"""Finds time lost between steps: checkpoints, validations, logging, callbacks and other hooks."""

from __future__ import annotations

import math

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence, once
from wellfed.explain.diagnosis.finding import Finding, Gain, found
from wellfed.explain.diagnosis.gains.pauses import MOST_RATIO, distance, pauses, rarer
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.words import Figures
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record.entries import WallEntry

_CHECKPOINT_KNOB, _VALIDATE_KNOB = "trainer.checkpoint_every_steps", "trainer.validate_every_steps"
_MINUTES_KNOB = "trainer.checkpoint_minutes"
_LOG_KNOB = "trainer.log_every_steps"
_CHECKPOINTS_FRAC, _VALIDATIONS_FRAC, _ROWS_FRAC = 0.01, 0.03, 0.01
"""Acceptable shares of the wall time: checkpoints, validations, logged rows."""
_MOST_OTHERS = 0.5
"""Maximum ratio of equally long steps that do not log to those that do."""
_USUAL = 50
_LEAST_REGULAR = 0.8
"""Minimum share of long pauses at equal distances."""


def frequent_checkpoints(evidence: Evidence, least_frac: float = limits.CHECKPOINT_FRAC) -> Finding | None:
    """Returns a finding if checkpoints take at least ``least_frac`` of the time, however few there are."""
    spent = pauses(evidence, "checkpoint")
    files = [event.get("file") for event in evidence.record.events if event["kind"] == "checkpoint"]
    if spent is None or not files or spent.frac < least_frac:
        return None
    figures: Figures = {"checkpoint_frac": spent.frac, "checkpoints": spent.times, "checkpoint_s": spent.each_s}
    num_best = spent.times * files.count("best.ckpt") / len(files)
    num_last, minutes = spent.times - num_best, evidence.value(_MINUTES_KNOB)
    every, when = distance(evidence, _CHECKPOINT_KNOB, num_last)
    knob, unit, most, least = _CHECKPOINT_KNOB, "every_steps", evidence.record.steps, 1.0
    due = most / every if every else evidence.record.epochs or 0.0
    if minutes and num_last - 1 > MOST_RATIO * max(1.0, due):  # most of them come by the minutes; one is at the end
        knob, unit, most, least = _MINUTES_KNOB, "every_minutes", math.ceil(spent.total_s / spent.frac / 60), due
        every, when = minutes, f"every {minutes:g} min"
    wanted = min(rarer(every, spent.frac / _CHECKPOINTS_FRAC), most) if every else 0
    # best.ckpt is written after the best validation so far, whatever the knob.
    if not every or wanted <= every or num_best > num_last:
        return found("frequent_checkpoints", figures, lost_frac=spent.frac)
    figures |= {unit: every, "_which": "last.ckpt" if num_best else "one", "_when": when}
    gain = spent.gain(num_best + max(1.0, least, num_last * every / wanted))
    return found("frequent_checkpoints", figures, (f"{knob}={wanted}",), gain=gain)


def frequent_validation(evidence: Evidence, least_frac: float = limits.VALIDATION_FRAC) -> Finding | None:
    """Returns a finding if validations take at least ``least_frac`` of the time, however few there are."""
    spent = pauses(evidence, "validate")
    if spent is None or spent.frac < least_frac:
        return None
    figures: Figures = {"validation_frac": spent.frac, "validations": spent.times, "validation_s": spent.each_s}
    every, when = distance(evidence, _VALIDATE_KNOB, spent.times)
    wanted = min(rarer(every, spent.frac / _VALIDATIONS_FRAC), evidence.record.steps) if every else 0
    if spent.times == 1 or not every or wanted <= every:
        return found("frequent_validation", figures, lost_frac=spent.frac)
    # A schedule or early stopping depends on the results of validations.
    stops_early = "early_stopping" in str(evidence.value("callbacks"))
    return found(
        "frequent_validation",
        {**figures, "every_steps": every, "_when": when},
        (f"{_VALIDATE_KNOB}={wanted}",),
        changes_learning=stops_early or bool(evidence.value("workload.schedule.monitor")),
        gain=spent.gain(max(1.0, spent.times * every / wanted)),
    )


@once
def frequent_logging(evidence: Evidence) -> Finding | None:
    """Returns a finding if steps that log are followed by longer gaps, or by long gaps if all steps log."""
    every, step_ms = int(evidence.value(_LOG_KNOB) or 0), evidence.steps.mean_ms
    host_ms = evidence.steps.column("host_ms")
    if not every or not step_ms or not len(host_ms):
        return None
    behind_ms, others_ms = _behind_rows(evidence, every)
    if len(behind_ms) < limits.FEWEST_PAUSES:
        return None
    row_ms, frac = float(np.mean(behind_ms)), float(np.sum(behind_ms)) / (step_ms * len(host_ms))
    # Rejects a few slow rows, and delays that other steps have, too.
    is_of_rows = np.median(behind_ms) >= (limits.HOST_MS if every == 1 else 0.5 * row_ms)
    if frac < limits.PAUSE_FRAC or not is_of_rows or np.sum(others_ms > 0.5 * row_ms) > _MOST_OTHERS * len(behind_ms):
        return None
    wall = evidence.record.wall
    if every == 1 and wall is not None and sum(wall["callbacks"].values()) >= 0.5 * frac * wall["total_s"]:
        return None  # hooks take that time
    wanted = max(_USUAL, rarer(every, frac / _ROWS_FRAC))
    won_frac = frac * (1 - every / wanted)
    gain = Gain.of_time(won_frac, 0.7 * won_frac if every > 1 else 0.0, frac)
    figures: Figures = {"logging_frac": frac, "row_ms": row_ms, "every_steps": every}
    figures |= {"_often": f"Every {every} steps" if every > 1 else "At each step"}
    return found("frequent_logging", figures, (f"{_LOG_KNOB}={wanted}",), gain=gain)


def _behind_rows(evidence: Evidence, every: int) -> tuple[Series, Series]:
    """Returns the excess time after steps that logged, and after other steps, without steps before a pause."""
    host_ms, steps = np.nan_to_num(evidence.steps.column("host_ms")), evidence.steps.column("step")
    known = evidence.steps.gap_ms < 0.1 * float(evidence.steps.mean_ms or 0.0)
    logged = ((steps - 1) % every == 0) & (steps > 1)
    if every == 1:
        return host_ms[known], host_ms[:0]
    others_ms = host_ms[known & ~logged]
    usual_ms = np.median(others_ms) if len(others_ms) else 0.0
    return host_ms[known & logged] - usual_ms, others_ms - usual_ms


def slow_callbacks(evidence: Evidence) -> Finding | None:
    """Returns a finding if callbacks and hooks take much of the time."""
    wall = evidence.record.wall
    if wall is None:
        return None
    hooks, of_s = wall["callbacks"], wall["total_s"]
    spent_s = sum(hooks.values())
    lost_s = spent_s - _hidden_s(evidence, wall)
    if of_s <= 0 or lost_s <= 0 or lost_s < limits.PAUSE_FRAC * of_s:
        return None
    hook = max(hooks, key=lambda name: hooks[name])
    if hook.endswith(".on_train_batch_end") and frequent_logging(evidence) is not None:
        return None  # a logging hook, reported by that rule
    figures: Figures = {"callbacks_frac": spent_s / of_s, "callback": hook, "callback_s": hooks[hook]}
    figures |= {"_hook_frac": hooks[hook] / of_s, "_training_s": of_s, "_others": hooks[hook] < 0.8 * spent_s}
    gain = Gain.of_time(lost_s / of_s, 0.85 * lost_s / of_s, lost_s / of_s)
    return found("slow_callbacks", figures, gain=gain)


def _hidden_s(evidence: Evidence, wall: WallEntry) -> float:
    """Returns the time of hooks that a GPU hid. Steps lost at most the distance to the ceiling.

    Without a ceiling, hooks after steps cost at most the time for which the GPU stood still between two steps, or
    before a validation or checkpoint. A hook that reads the loss waits for the GPU, which computes meanwhile.
    """
    time, factor = evidence.record.time, evidence.ceiling_factor
    if not evidence.on_gpu or time is None:
        return 0.0
    within_s = hooks_within_steps_s(wall)
    steps_s = wall["steps_s"] + within_s
    if factor is None:
        after_s = sum(s for name, s in wall["callbacks"].items() if name.endswith(".on_train_batch_end"))
        gaps_s = float(evidence.steps.gap_ms.sum()) / 1e3
        gaps_s -= wall["validation_s"] + wall["checkpoint_s"] + wall["epoch_end_s"]
        return max(0.0, after_s - time["host_frac"] * steps_s - max(0.0, gaps_s))
    return within_s - min(within_s, (1 - 1 / max(1.0, factor)) * steps_s)


def check_between_steps(evidence: Evidence) -> Finding | None:
    """Returns a finding if no hooks were timed, and much time passes between steps regularly, unlike the machine's."""
    host_ms, step_ms = np.nan_to_num(evidence.steps.column("host_ms")), evidence.steps.mean_ms
    if evidence.record.wall is not None or not len(host_ms) or not step_ms or frequent_logging(evidence) is not None:
        return None
    usual_ms, all_ms = float(np.median(host_ms)), step_ms * len(host_ms)
    every, long_ms, lost_ms = 1, usual_ms, usual_ms * len(host_ms)
    if usual_ms < limits.HOST_MS or lost_ms < limits.HOST_FRAC * all_ms:
        typical_ms = float(np.sort(host_ms)[-min(limits.FEWEST_PAUSES + 1, len(host_ms))])
        is_long = host_ms > max(limits.HOST_MS, 5 * usual_ms, 0.5 * typical_ms)
        every = _distance(np.flatnonzero(is_long).astype(float))
        lost_ms = float(np.sum(host_ms[is_long] - usual_ms))
        if not every or lost_ms < limits.HOST_FRAC * all_ms:
            return None
        long_ms = float(np.mean(host_ms[is_long]))
    frac, time = lost_ms / all_ms, evidence.record.time
    figures: Figures = {"host_frac": time["host_frac"] if time else frac, "host_ms": long_ms, "every_steps": every}
    figures |= {"_often": "Between two steps" if every == 1 else f"Every {every} steps", "_lost_frac": frac}
    figures["_callbacks"] = evidence.value("callbacks") or None
    return found("slow_callbacks", figures, case="untimed", gain=Gain.of_time(frac, 0.5 * frac, frac))


def _distance(indices: Series) -> int:
    """Returns the steps between two indices if nearly all are equally far apart, else 0."""
    if len(indices) <= limits.FEWEST_PAUSES:
        return 0
    apart, times = np.unique(np.diff(indices), return_counts=True)
    most = int(times.argmax())
    return int(apart[most]) if times[most] >= _LEAST_REGULAR * (len(indices) - 1) and apart[most] > 1 else 0
