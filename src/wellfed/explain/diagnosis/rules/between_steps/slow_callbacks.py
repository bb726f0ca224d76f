"""Finds callbacks, hooks of a LightningModule and schedulers that take a large part of training, and names them."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.compute_phases import OTHER, phase_shares
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.gains.pauses import gain_of, pauses
from wellfed.explain.diagnosis.rules.between_steps import frequent_checkpoints, frequent_logging, frequent_validation
from wellfed.explain.diagnosis.rules.feeding import restarted_workers
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import FEWEST_PAUSES, HOOKS_FRAC, HOST_FRAC, HOST_MS, VALIDATION_FRAC
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record import WallEntry
from wellfed.units import counted, show_duration, show_ms, show_percent

_BETWEEN_PASSES_FRAC = 0.2
"""Minimum share of a step between its passes for a finding (a proposal). A large loss outside of the model takes 10 %.
"""
_OF_PAUSES = (restarted_workers, frequent_validation, frequent_checkpoints)
_LEAST_REGULAR = 0.8
"""Minimum share of long pauses at equal distances."""
_NAMED_FRAC, _MOST_NAMED = 0.2, 3
"""Minimum share of all hooks' time for a hook to be named beside the costliest, and maximum number of named hooks."""
_FORWARD_UNSEEN, _ANY_UNSEEN = "forward pass", "not told apart"
"""Words in the message of an `unseen` event if forward passes, or any passes, of a watched script were not seen."""


def check(evidence: Evidence, least_frac: float = HOOKS_FRAC) -> Finding | None:
    """Returns a finding if they take ``least_frac`` of the wall time. If that is unknown, epochs are looked at."""
    wall = evidence.record.wall
    if wall is None:
        return _between_epochs(evidence)
    hooks, of_s = wall["callbacks"], wall["total_s"]
    spent_s = sum(hooks.values())
    lost_s = spent_s - _hidden_s(evidence, wall)
    if of_s <= 0 or lost_s <= 0 or lost_s < least_frac * of_s:
        return None
    names = sorted(hooks, key=lambda name: -hooks[name])
    if names[0].endswith(".on_train_batch_end") and frequent_logging.check(evidence) is not None:
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
    )


def _hidden_s(evidence: Evidence, wall: WallEntry) -> float:
    """Returns the time of hooks that a GPU hid. Steps lost at most the distance to the ceiling.

    Without a ceiling, hooks after steps cost at most the time for which the GPU stood still between two steps. A hook
    that reads the loss waits for the GPU, which computes meanwhile.
    """
    time, factor = evidence.record.time, evidence.ceiling_factor
    if not evidence.on_gpu or time is None:
        return 0.0
    within_s = hooks_within_steps_s(wall)
    steps_s = wall["steps_s"] + within_s
    if factor is None:
        after_s = sum(s for name, s in wall["callbacks"].items() if name.endswith(".on_train_batch_end"))
        return max(0.0, after_s - time["host_frac"] * steps_s)
    return within_s - min(within_s, (1 - 1 / max(1.0, factor)) * steps_s)


def check_between_steps(evidence: Evidence) -> Finding | None:
    """Returns a finding if much time passes between steps regularly, and no hooks were timed. Irregular pauses are the
    machine's."""
    host_ms, step_ms = np.nan_to_num(evidence.steps.column("host_ms")), evidence.steps.mean_ms
    if evidence.record.wall is not None or not len(host_ms) or not step_ms:
        return None
    if frequent_logging.check(evidence) is not None:
        return None
    # Compute begins with the first forward pass that is seen: one before it counts as time between steps.
    if phase_shares(evidence.record.time).get("forward", 1.0) > 0 and _has_unseen(evidence, _FORWARD_UNSEEN):
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
    frac, callbacks, time = lost_ms / all_ms, evidence.value("callbacks"), evidence.record.time
    often = "Between two steps" if every == 1 else f"Every {every} steps"
    who = f"callbacks ({callbacks})" if callbacks else "callbacks"
    return Finding(
        "slow_callbacks",
        f"{often} {show_duration(long_ms / 1e3)} pass before the next begins, {show_percent(frac)} of the time: {who}, "
        "loggers and hooks of the model run then. debug=profiler shows which.",
        {"host_frac": time["host_frac"] if time else frac, "host_ms": long_ms, "every_steps": every},
        gain=gain_of(frac, 0.5 * frac, frac),
    )


def _between_epochs(evidence: Evidence) -> Finding | None:
    """Returns a finding if much time passes at the starts of epochs, and no other rule names the starts of workers,
    validations or checkpoints, around which more time passes than was timed. As many of these as there may be at each
    start are subtracted. The first steps of a run say nothing on it, nor does a record without phases."""
    wall, gap_ms, phases = evidence.wall.entry, evidence.steps.gap_ms, evidence.record.phases
    starts = np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    if wall is None or not phases or evidence.record.status == "running" or len(starts) < FEWEST_PAUSES:
        return None
    if any(rule.check(evidence) for rule in _OF_PAUSES):
        return None
    known_s = sum(
        spent.each_s * np.ceil(spent.times / len(starts))
        for phase in ("validate", "checkpoint")
        if (spent := pauses(evidence, phase)) is not None
    )
    late_s = float(np.median(gap_ms[starts])) / 1e3 - known_s
    frac = late_s * len(starts) / max(wall["total_s"], 1e-9)
    if frac < VALIDATION_FRAC:  # as for a validation, which may not have been recognised
        return None
    text = (
        f"{show_percent(frac)} of the wall time of training passed between epochs: {show_duration(late_s)} before each "
        f"of {counted(len(starts), 'epoch')}, beside the validations and checkpoints that were seen. Pictures, or a "
        "validation without a DataLoader, are code of this kind. debug=profiler shows which."
    )
    figures: Figures = {"between_frac": frac, "pauses": len(starts), "pause_s": late_s}
    return Finding("slow_callbacks", text, figures, gain=gain_of(frac, 0.5 * frac, frac))


def check_between_passes(evidence: Evidence) -> Finding | None:
    """Returns a finding if much of a step passes outside of forward, backward and optimizer. Needs a forward pass that
    was seen: else its time counts as other compute."""
    shares, step_ms = phase_shares(evidence.record.time), evidence.steps.mean_ms
    frac = shares.get(OTHER, 0.0)
    if evidence.record.wall is not None or step_ms is None or frac < _BETWEEN_PASSES_FRAC:
        return None
    if not shares["forward"] or _has_unseen(evidence, _ANY_UNSEEN):
        return None
    text = (
        f"{show_ms(frac * step_ms)} of each step, {show_percent(frac)}, pass between forward pass, backward pass and "
        "optimizer. The loss, statistics or clipping of gradients, and parts of a model that are called one by one may "
        "run then. debug=profiler shows which."
    )
    figures: Figures = {"between_passes_frac": frac, "between_passes_ms": frac * step_ms}
    return Finding("slow_callbacks", text, figures, gain=gain_of(0.5 * frac, 0.0, frac))


def _has_unseen(evidence: Evidence, words: str) -> bool:
    """Returns whether a watched script has an `unseen` event with these words."""
    unseen = [str(event.get("message")) for event in evidence.record.events if event["kind"] == "unseen"]
    return any(words in message for message in unseen)


def _distance(indices: Series) -> int:
    """Returns the steps between two indices if nearly all are equally far apart, else 0."""
    if len(indices) <= FEWEST_PAUSES:
        return 0
    apart, times = np.unique(np.diff(indices), return_counts=True)
    most = int(times.argmax())
    return int(apart[most]) if times[most] >= _LEAST_REGULAR * (len(indices) - 1) and apart[most] > 1 else 0
