"""Finds time lost between steps: checkpoints, validations, logging, callbacks and other hooks."""

from __future__ import annotations

import math

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import PROFILE, Finding, Gain
from wellfed.explain.diagnosis.gains.pauses import MOST_RATIO, distance, gain_of, pauses, rarer
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import phase_shares
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record.entries import WallEntry
from wellfed.units import show_duration, show_percent

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
_NAMED_FRAC, _MOST_NAMED = 0.2, 3
"""Minimum share of all hooks' time for a hook to be named beside the costliest, and maximum number of named hooks."""
_FORWARD_UNSEEN = "forward pass"
"""Words in the message of an `unseen` event if forward passes of a watched script were not seen."""


def frequent_checkpoints(evidence: Evidence) -> Finding | None:
    """Returns a finding if checkpoints take much of the time, however few there are."""
    spent = pauses(evidence, "checkpoint")
    files = [event.get("file") for event in evidence.record.events if event["kind"] == "checkpoint"]
    if spent is None or not files or spent.frac < limits.CHECKPOINT_FRAC:
        return None
    text = spent.describe("checkpoint")
    figures = {"checkpoint_frac": spent.frac, "checkpoints": spent.times, "checkpoint_s": spent.each_s}
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
        advice = "Make a checkpoint smaller, or write it to a faster disk."
        return Finding("frequent_checkpoints", f"{text}.", figures, lost_frac=spent.frac, advice=advice)
    which = "last.ckpt" if num_best else "one"  # best.ckpt is written in addition
    return Finding(
        "frequent_checkpoints",
        f"{text}, {which} {when}. A run that dies loses what it learned since the last.",
        {**figures, unit: every},
        (f"{knob}={wanted}",),
        gain=spent.gain(num_best + max(1.0, least, num_last * every / wanted)),
    )


def frequent_validation(evidence: Evidence, least_frac: float = limits.VALIDATION_FRAC) -> Finding | None:
    """Returns a finding if validations take at least ``least_frac`` of the time, however few there are."""
    spent = pauses(evidence, "validate")
    if spent is None or spent.frac < least_frac:
        return None
    text = spent.describe("validation")
    figures = {"validation_frac": spent.frac, "validations": spent.times, "validation_s": spent.each_s}
    every, when = distance(evidence, _VALIDATE_KNOB, spent.times)
    wanted = min(rarer(every, spent.frac / _VALIDATIONS_FRAC), evidence.record.steps) if every else 0
    if spent.times == 1 or not every or wanted <= every:
        advice = "Validate on a smaller split, or train for longer."
        return Finding("frequent_validation", f"{text}.", figures, lost_frac=spent.frac, advice=advice)
    # A schedule or early stopping depends on the results of validations.
    stops_early = "early_stopping" in str(evidence.value("callbacks"))
    return Finding(
        "frequent_validation",
        f"{text}, one {when}.",
        {**figures, "every_steps": every},
        (f"{_VALIDATE_KNOB}={wanted}",),
        changes_learning=stops_early or bool(evidence.value("workload.schedule.monitor")),
        gain=spent.gain(max(1.0, spent.times * every / wanted)),
    )


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
    # A row fetches its figures from the device, which idles until the host is ahead again.
    found = contradiction(evidence.record)
    is_loop_slow = every == 1 and found is not None and found.slower == "loop"
    # Rejects a few slow rows, and delays that other steps have, too.
    is_of_rows = is_loop_slow or np.median(behind_ms) >= (limits.HOST_MS if every == 1 else 0.5 * row_ms)
    if frac < limits.PAUSE_FRAC or not is_of_rows or np.sum(others_ms > 0.5 * row_ms) > _MOST_OTHERS * len(behind_ms):
        return None
    hook, hook_frac = _costliest_hook(evidence)
    if every == 1 and hook_frac >= 0.5 * frac:  # the hook is the cause
        return None
    wanted = max(_USUAL, rarer(every, frac / _ROWS_FRAC))
    factor = evidence.ceiling_factor or 1.0
    won_frac = frac * (1 - every / wanted)
    text = f"Every {every} steps figures are logged" if every > 1 else "Figures are logged at each step"
    return Finding(
        "frequent_logging",
        f"{text}, and the loop stands still for {show_duration(row_ms / 1e3)} then: {show_percent(frac)} of the "
        f"time.{f' {hook} takes part in it.' if hook_frac >= 0.1 * frac else ''}",
        {"logging_frac": frac, "row_ms": row_ms, "every_steps": every},
        (f"{_LOG_KNOB}={wanted}",),
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
    if of_s <= 0 or lost_s <= 0 or lost_s < limits.HOOKS_FRAC * of_s:
        return None
    names = sorted(hooks, key=lambda name: -hooks[name])
    if names[0].endswith(".on_train_batch_end") and frequent_logging(evidence) is not None:
        return None  # a logging hook, reported by that rule
    named = [name for name in names if name == names[0] or hooks[name] >= _NAMED_FRAC * spent_s][:_MOST_NAMED]
    who, took_s = f"{named[0]} takes", hooks[named[0]]
    if len(named) > 1:
        each = [f"{name} {show_percent(hooks[name] / of_s)}" for name in named]
        who, took_s = f"{', '.join(each)}: callbacks and hooks take", spent_s
    text = f"{who} {show_percent(took_s / of_s)} of the wall time of training, {show_duration(took_s)} of "
    frac = lost_s / of_s
    return Finding(
        "slow_callbacks",
        f"{text}{show_duration(of_s)}.",
        {"callbacks_frac": spent_s / of_s, "callback": named[0], "callback_s": hooks[named[0]]},
        gain=gain_of(frac, 0.85 * frac, frac),
        advice=f"Make {named[0]} cheaper, or call it less often.",
    )


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
    if evidence.record.wall is not None or not len(host_ms) or not step_ms:
        return None
    if frequent_logging(evidence) is not None:
        return None
    # Compute begins with the first forward pass that is seen: one before it counts as time between steps.
    if phase_shares(evidence.record.time).get("forward", 1.0) > 0 and _has_unseen(evidence, _FORWARD_UNSEEN):
        return None
    usual_ms, all_ms = float(np.median(host_ms)), step_ms * len(host_ms)
    every, long_ms = 1, usual_ms
    lost_ms = usual_ms * len(host_ms)
    if usual_ms < limits.HOST_MS or lost_ms < limits.HOST_FRAC * all_ms:
        typical_ms = float(np.sort(host_ms)[-min(limits.FEWEST_PAUSES + 1, len(host_ms))])
        is_long = host_ms > max(limits.HOST_MS, 5 * usual_ms, 0.5 * typical_ms)
        every = _distance(np.flatnonzero(is_long).astype(float))
        lost_ms = float(np.sum(host_ms[is_long] - usual_ms))
        if not every or lost_ms < limits.HOST_FRAC * all_ms:
            return None
        long_ms = float(np.mean(host_ms[is_long]))
    frac, callbacks, time = lost_ms / all_ms, evidence.value("callbacks"), evidence.record.time
    often = "Between two steps" if every == 1 else f"Every {every} steps"
    who = f"callbacks ({callbacks})" if callbacks else "callbacks"
    return Finding(
        "slow_callbacks",
        f"{often} {show_duration(long_ms / 1e3)} pass before the next begins, {show_percent(frac)} of the time: {who}, "
        "loggers and hooks of the model run then.",
        {"host_frac": time["host_frac"] if time else frac, "host_ms": long_ms, "every_steps": every},
        gain=gain_of(frac, 0.5 * frac, frac),
        advice=PROFILE,
    )


def _has_unseen(evidence: Evidence, words: str) -> bool:
    unseen = [str(event.get("message")) for event in evidence.record.events if event["kind"] == "unseen"]
    return any(words in message for message in unseen)


def _distance(indices: Series) -> int:
    """Returns the steps between two indices if nearly all are equally far apart, else 0."""
    if len(indices) <= limits.FEWEST_PAUSES:
        return 0
    apart, times = np.unique(np.diff(indices), return_counts=True)
    most = int(times.argmax())
    return int(apart[most]) if times[most] >= _LEAST_REGULAR * (len(indices) - 1) and apart[most] > 1 else 0
