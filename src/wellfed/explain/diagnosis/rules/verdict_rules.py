"""Verdicts on a run as a whole (too short, fed, time that no rule names), and notes on how certain they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, found
from wellfed.explain.diagnosis.gains.feeding import workers_take_cores
from wellfed.explain.diagnosis.rules.pause_rules import check_between_steps, frequent_logging, slow_callbacks
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.script_words import NO_LOADER, NO_STEP, OTHER_THREAD
from wellfed.explain.diagnosis.words import Figures
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import WallEntry
from wellfed.units import counted, show_percent


def too_few_steps(evidence: Evidence) -> Finding | None:
    """Returns a note if too few steps ran for a verdict, with the shares so far."""
    measured = evidence.steps.num_measured
    if measured >= limits.FEWEST_STEPS or has_no_step(evidence):
        return None
    figures: Figures = {"steps_measured": measured, "_fewest": limits.FEWEST_STEPS}
    figures["_shares"] = _shares(evidence) if measured and evidence.record.time is not None else None
    case = "running" if evidence.record.status == "running" else ""
    return found("too_few_steps", figures, case=case, is_note=True)


def unknown(evidence: Evidence) -> Finding | None:
    """Returns the verdict on a run whose steps were counted, but not timed, or on a script without steps."""
    if evidence.record.time is not None:
        return None
    return found("unknown", {}, case="no_step" if has_no_step(evidence) else "", is_note=True)


def has_no_step(evidence: Evidence) -> bool:
    """Returns whether a watched script ended without a step that could be timed: a longer run may show none either."""
    return NO_STEP in _unseen(evidence)


def fed(evidence: Evidence) -> Finding:
    """Returns the verdict on a run of which no cause costs `WORTH_FRAC` of the time."""
    factor, is_seen = evidence.ceiling_factor, not _unseen_data(evidence)
    is_waiting = evidence.wait_frac >= limits.WORTH_FRAC
    figures: Figures = {"wait_frac": evidence.wait_frac, "of_ceiling_frac": None if factor is None else 1 / factor}
    figures |= {"_shares": _shares(evidence), "_fed": is_seen and not is_waiting}
    figures["_steps_frac"] = evidence.wall.steps_frac if is_waiting else None
    if factor is not None:
        reached = "As fast as with all data on the device" if factor <= 1 else f"{_whole(1 / factor)} of the ceiling"
        figures["_reached"] = reached
    gpus = evidence.telemetry.gpus if evidence.on_gpu else []
    card = {name: evidence.telemetry.mean(key, gpus[0]) for key, name in _OF_CARD.items()} if gpus else {}
    figures["_card"] = ", ".join(f"{name} {mean:.0f} %" for name, mean in card.items() if mean is not None) or None
    return found("healthy", figures, is_note=True)


_OF_CARD = {"sm_active_pct": "multiprocessors active", "tensor_active_pct": "tensor cores", "dram_active_pct": "memory"}
"""Columns of telemetry.csv -> words, for what a fed card does."""


def _shares(evidence: Evidence) -> str:
    """Returns which share of a step computes, waits and copies, as text."""
    time = evidence.record.time
    assert time is not None
    where = "" if evidence.on_gpu else " on the CPU"
    others = " or waits for other ranks" if evidence.num_ranks > 1 else ""
    copies = f", {_whole(evidence.copy_frac)} copies" if evidence.copy_frac >= limits.COPY_FRAC else ""
    waits = f", {_whole(time['wait_frac'])} waits{' for data' * bool(others)}"
    if unseen := _unseen_data(evidence):
        waits = f", and waiting for data was not seen ({unseen.rstrip('.')})"
    return f"{_whole(time['compute_frac'])} of each step computes{where}{others}{waits}{copies}"


def _unseen_data(evidence: Evidence) -> str:
    """Returns why a watched script's waiting for data was not seen; empty if it was."""
    return next((message for message in _unseen(evidence) if message in (NO_LOADER, OTHER_THREAD)), "")


def _unseen(evidence: Evidence) -> list[str]:
    return [str(event.get("message")) for event in evidence.record.events if event["kind"] == "unseen"]


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


def unexplained(evidence: Evidence) -> Finding | None:
    """Returns the largest part of the training's time that is neither compute nor named by a rule, if it is large."""
    time, in_steps = evidence.record.time, evidence.wall.steps_frac
    wait_frac, host_frac = in_steps * evidence.wait_frac, in_steps * (time["host_frac"] if time else 0.0)
    beside, beside_frac = _largest_beside(evidence)
    most = max(wait_frac, host_frac, beside_frac)
    if most < limits.WORTH_FRAC:
        return None
    if most == wait_frac:
        return found("unexplained", {"wait_frac": evidence.wait_frac, "_lost_frac": most}, case="waits", lost_frac=most)
    where = "outside of steps and of all that is timed" if beside == "other" else f"in {beside}"
    where = "between steps, outside of callbacks and hooks" if most == host_frac else where
    return found("unexplained", {"between_frac": most, "_where": where}, lost_frac=most)


def _largest_beside(evidence: Evidence) -> tuple[str, float]:
    """Returns the largest kind of wall time that no rule names, with its share. A run starts and ends once, whatever
    its length, so that is left out."""
    has_ended = evidence.record.status != "running" and evidence.record.phases
    wall = evidence.wall.entry if evidence.record.wall is not None or has_ended else None
    if wall is None or (of_s := wall["total_s"] - wall["start_s"] - wall["end_s"]) <= 0:
        return "", 0.0
    shares = {WALL_NAMES[key]: wall[key] / of_s for key in ("epoch_end_s", "logging_s", "other_s")}
    name = max(shares, key=lambda name: shares[name])
    return name, shares[name]


def busy_machine(evidence: Evidence) -> Finding | None:
    """Returns a note if in many readings the cores were full and others used a large part of them. None if the run
    needed none of them: no thread waited for a core, and no step for its batch."""
    cores, curve = evidence.cores, evidence.curves.get(HOST, {})
    own, others = curve.get("cpu_pct"), evidence.telemetry.taken_cores
    waited_frac = evidence.record.host.get("core_wait_frac")
    if waited_frac is not None and waited_frac < limits.CORE_WAIT_FRAC and evidence.wait_frac < limits.WAIT_FRAC:
        return None
    if not cores or own is None or len(own) != len(others) or not evidence.telemetry.is_alone:
        return None
    known = np.isfinite(own) & np.isfinite(others)
    own, others = own[known] / 100, others[known]
    is_busy = (others >= limits.OTHERS_FRAC * cores) & (own + others >= limits.CPU_FULL_FRAC * cores)
    if np.sum(is_busy) < limits.FEWEST_OF_CARD or np.mean(is_busy) < limits.BUSY_READINGS_FRAC:
        return None
    frac = float(np.mean(is_busy))
    figures: Figures = {"others_cores": float(others[is_busy].mean()), "own_cores": float(own[is_busy].mean())}
    figures |= {"cores": cores, "busy_frac": frac, "_at_times_frac": frac if frac <= limits.CPU_FULL_FRAC else None}
    return found("busy_machine", figures, is_note=True)


def machine_was_slower(evidence: Evidence) -> Finding | None:
    """Returns a note if the ceiling contradicts the time spent on data and callbacks."""
    doubt, factor = contradiction(evidence.record), evidence.ceiling_factor
    if doubt is None or factor is None or workers_take_cores(evidence):  # crowding workers explain the slowness
        return None
    between = (frequent_logging, slow_callbacks, check_between_steps)
    if doubt.slower == "steps" and any(rule(evidence) for rule in between):
        return None
    figures: Figures = {"slower": doubt.slower, "data_frac": doubt.data_frac, "ceiling_factor": factor}
    figures |= {"_of_ceiling_frac": 1 / factor, "_message": doubt.message}
    figures |= {"others_cores": evidence.telemetry.mean_others_cores, "_cores": evidence.cores}
    return found("machine_was_slower", figures, is_note=True)


def steps_varied(evidence: Evidence) -> Finding | None:
    """Returns a note if the rate is hardly known."""
    throughput = evidence.record.throughput
    if throughput is None or not throughput["ci95"] or throughput["samples_per_s"] <= 0:
        return None
    low, high = throughput["ci95"]
    half_frac = (high - low) / 2 / throughput["samples_per_s"]
    if half_frac <= limits.WIDEST_HALF_FRAC:
        return None
    known = "hardly known" if half_frac >= 1 else f"known to within {_whole(half_frac)}"
    return found("steps_varied", {"half_interval_frac": half_frac, "_known": known}, is_note=True)


WALL_NAMES = {
    "start_s": "start",
    "validation_s": "validations",
    "checkpoint_s": "checkpoints",
    "epoch_end_s": "ends of epochs",
    "logging_s": "logging",
    "end_s": "end",
    "other_s": "other",
}
"""Parts of the wall time beside steps and callbacks, by their keys in the record."""
_LEAST_NAMED_FRAC = 0.01


def beside_steps(wall: WallEntry, hooks: Mapping[str, float], most: int) -> list[str]:
    """Returns the kinds of wall time beside steps with their shares, the largest first. ``hooks``: seconds by name."""
    spent_s = {**{name: wall[key] for key, name in WALL_NAMES.items()}, **hooks}  # type: ignore[literal-required]
    shares = {name: one_s / wall["total_s"] for name, one_s in spent_s.items()}
    largest = sorted(shares, key=lambda name: -shares[name])[:most]
    return [f"{name} {show_percent(shares[name])}" for name in largest if shares[name] >= _LEAST_NAMED_FRAC]


_EXPLAINED_FRAC = 0.5
"""Share of idle time in waiting, copies and the loop, beyond which their rules explain it."""


def utilisation_swings(evidence: Evidence) -> Finding | None:
    """Returns levels and period of the swing, and settings with the same period."""
    if evidence.swings.deepest is None:
        return None
    gpu, swing = evidence.swings.deepest
    idle_frac = 1 - float(evidence.telemetry.curve("util_pct", gpu).mean()) / swing.high
    host_frac = evidence.record.time["host_frac"] if evidence.record.time else 0.0
    held_up_frac = evidence.wait_frac + evidence.copy_frac + host_frac
    if held_up_frac >= _EXPLAINED_FRAC * idle_frac:
        return None
    due = evidence.swings.settings_with_period(swing.period_s)
    figures: Figures = {"gpu": gpu, "low_pct": swing.low, "high_pct": swing.high, "period_s": swing.period_s}
    figures |= {"_swing": evidence.swings.describe_utilisation(), "_held_up_frac": held_up_frac}
    figures["_due"] = f"As often comes {' and '.join(due)}." if due else "Nothing that was set comes as often."
    return found("utilisation_swings", figures, lost_frac=idle_frac - held_up_frac)


_LR = "workload.optimizer.lr"


def loss_blows_up(evidence: Evidence) -> Finding | None:
    """Returns a finding if the training loss left its running median, or was not finite."""
    steps, values = evidence.losses
    events = [event for event in evidence.record.events if event["kind"] == "nan"]
    at = _first_jump(values)
    ended = bool(events) and events[-1].get("action") == "raise"
    if events:
        figures: Figures = {"step": int(events[0].get("step") or 0), "non_finite_steps": evidence.num_events("nan")}
        figures["_ended"] = ended
        figures["_times"] = None if ended else counted(evidence.num_events("nan"), "step")
    elif at is not None:
        median = float(np.median(values[max(0, at - limits.LOSS_WINDOW) : at]))
        figures = {"step": int(steps[at]), "loss": float(values[at]), "median_before": median}
        figures |= {"_rose": bool(np.isfinite(values[at])), "_is_nan": not np.isfinite(values[at])}
    else:
        return None
    sample = next((event for event in events if "sample" in event), None)
    if sample is not None:
        skipped = [*(evidence.value("loader.skip_ids") or ()), sample["sample"]]
        figures |= {"_sample": sample["sample"], "_value": sample.get("value", "NaN")}
        figures["_where"] = f"epoch {sample.get('epoch')}, batch {sample.get('batch')}"
        change: tuple[str, ...] = (f"loader.skip_ids=[{','.join(map(str, skipped))}]",)
    else:
        lr, clip = evidence.value(_LR), "trainer.gradient_clip"
        # Adam and its variants move each weight by about the rate per step. Clipping does not help if that is too much.
        highest = 0.01 if "adam" in str(evidence.value("workload.optimizer._target_")).lower() else 1.0
        is_number = isinstance(lr, int | float) and lr > 0
        is_too_high = is_number and lr > highest
        change = (f"{_LR}={min(lr / 10, highest):g}",) if is_number else ()
        if evidence.value(clip) is None and clip not in evidence.record.refused and not is_too_high:
            change = (f"{clip}=1.0",)
        figures |= {"_lr": lr if is_too_high else None, "_guess": not is_too_high}
    return found("loss_blows_up", figures, change, changes_learning=True, lost_frac=1.0 if ended else None)


def _first_jump(values: Series) -> int | None:
    """Returns the index of the first value that is not finite, or far above the median of those before it."""
    if len(values) <= limits.LOSS_WINDOW:
        return None
    later = values[limits.LOSS_WINDOW :]
    medians = np.median(sliding_window_view(values, limits.LOSS_WINDOW)[:-1], axis=1)
    # A factor has no meaning near zero or below.
    jumps = ~np.isfinite(later) | ((medians > 0) & (later > limits.LOSS_GROWTH * medians))
    return int(limits.LOSS_WINDOW + jumps.argmax()) if jumps.any() else None
