"""Verdicts on a run as a whole (too short, fed, time that no rule names), and notes on how certain they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import PROFILE, Figures, Finding
from wellfed.explain.diagnosis.gains.feeding import workers_take_cores
from wellfed.explain.diagnosis.rules.pause_rules import check_between_steps, frequent_logging, slow_callbacks
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.script_words import NO_LOADER, OTHER_THREAD
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import WallEntry
from wellfed.units import counted, show_percent


def too_few_steps(evidence: Evidence) -> Finding | None:
    """Returns a note if too few steps ran for a verdict, with the shares so far."""
    measured = evidence.steps.num_measured
    if measured >= limits.FEWEST_STEPS:
        return None
    text = f"{counted(measured, 'step')} after the warm-up" if measured else "No step was measured after the warm-up"
    text += f", and a verdict takes {limits.FEWEST_STEPS}."
    if measured and evidence.record.time is not None:
        text += f" So far {_shares(evidence)}."
    advice = "Give the run more steps (trainer.max_steps, trainer.max_epochs)."
    if evidence.record.status == "running":
        advice = "Ask again when the run has come further."
    return Finding("too_few_steps", text, {"steps_measured": measured}, advice=advice, is_note=True)


def unknown(evidence: Evidence) -> Finding | None:
    """Returns the verdict on a run whose steps were counted, but not timed."""
    if evidence.record.time is not None:
        return None
    return Finding("unknown", "The steps of this run were not timed, so its time can't be divided.", {}, is_note=True)


def fed(evidence: Evidence) -> Finding:
    """Returns the verdict on a run of which no cause costs `WORTH_FRAC` of the time."""
    factor, steps_frac = evidence.ceiling_factor, evidence.wall.steps_frac
    text = _shares(evidence)
    if evidence.wait_frac < limits.WORTH_FRAC:
        text += "." if _unseen_data(evidence) else ": data is not the limit."
    else:
        text += f", and steps take {show_percent(steps_frac)} of training, start and end left out."
    figures: Figures = {"wait_frac": evidence.wait_frac}
    if factor is not None:
        figures["of_ceiling_frac"] = 1 / factor
        reached = "As fast as with all data on the device" if factor <= 1 else f"{_whole(1 / factor)} of the ceiling"
        text += f" {reached}."
    gpus = evidence.telemetry.gpus if evidence.on_gpu else []
    card = {name: evidence.telemetry.mean(key, gpus[0]) for key, name in _OF_CARD.items()} if gpus else {}
    known = [f"{name} {mean:.0f} %" for name, mean in card.items() if mean is not None]
    if known:
        text += f" Next, look at what the card does: {', '.join(known)}."
    return Finding("healthy", text, figures, is_note=True)


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
    messages = [str(event.get("message")) for event in evidence.record.events if event["kind"] == "unseen"]
    return next((message for message in messages if message in (NO_LOADER, OTHER_THREAD)), "")


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
    figures: Figures = {"between_frac": most}
    advice = PROFILE
    if most == wait_frac:
        text, figures = f"{show_percent(wait_frac)} of training waits for data", {"wait_frac": evidence.wait_frac}
        if _epoch_start_frac(evidence) >= _MOSTLY:
            text += ", nearly all of that in the first steps of each epoch: nothing is built ahead across its end."
            advice = "Make epochs longer."
        else:
            text += ", and the cause of the delay is unknown."
    elif most == host_frac:
        text = f"{show_percent(most)} of the time passes between steps, outside of callbacks and hooks."
    else:
        what = "outside of steps and of all that is timed" if beside == "other" else f"in {beside}"
        text = f"{show_percent(most)} of training, start and end left out, passed {what}."
    return Finding("unexplained", text, figures, lost_frac=most, advice=advice)


def _largest_beside(evidence: Evidence) -> tuple[str, float]:
    """Returns the largest kind of wall time beside steps and callbacks, with its share. A run starts and ends once,
    whatever its length, so that is left out."""
    has_ended = evidence.record.status != "running" and evidence.record.phases
    wall = evidence.wall.entry if evidence.record.wall is not None or has_ended else None
    if wall is None or (of_s := wall["total_s"] - wall["start_s"] - wall["end_s"]) <= 0:
        return "", 0.0
    shares = {name: wall[key] / of_s for key, name in WALL_NAMES.items() if name not in ("start", "end")}  # type: ignore[literal-required]
    name = max(shares, key=lambda name: shares[name])
    return name, shares[name]


_MOSTLY = 0.8
"""Minimum share of the waiting in the first steps of epochs, for that to be its cause."""


def _epoch_start_frac(evidence: Evidence) -> float:
    """Returns the share of all waiting in the first steps of later epochs, one for each worker."""
    starts = np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    if not evidence.num_workers or not len(starts):
        return 0.0
    indices = np.unique((starts[:, None] + np.arange(evidence.num_workers)).ravel())
    waited_ms = evidence.steps.wait_ms
    return float(waited_ms[indices[indices < len(waited_ms)]].sum() / max(waited_ms.sum(), 1e-9))


def busy_machine(evidence: Evidence) -> Finding | None:
    """Returns a note if in many readings the cores were full and others used a large part of them. None if the run
    needed none of them: no thread waited for a core, and no step for its batch."""
    cores, curve = evidence.cores, evidence.curves.get(HOST, {})
    own, others = curve.get("cpu_pct"), evidence.telemetry.others_cores
    waited_frac = evidence.record.host.get("core_wait_frac")
    if waited_frac is not None and waited_frac < limits.CORE_WAIT_FRAC and evidence.wait_frac < limits.WAIT_FRAC:
        return None
    if not cores or own is None or len(own) != len(others):
        return None
    known = np.isfinite(own) & np.isfinite(others)
    own, others = own[known] / 100, others[known]
    is_busy = (others >= limits.OTHERS_FRAC * cores) & (own + others >= limits.CPU_FULL_FRAC * cores)
    if np.sum(is_busy) < limits.FEWEST_OF_CARD or np.mean(is_busy) < limits.BUSY_READINGS_FRAC:
        return None
    frac, taken, left = float(np.mean(is_busy)), float(others[is_busy].mean()), float(own[is_busy].mean())
    when = "" if frac > limits.CPU_FULL_FRAC else f" for {show_percent(frac)} of the time"
    return Finding(
        "busy_machine",
        f"Other programs took {taken:.1f} of {cores:g} cores{when}; this run got {left:.1f}. So its rate is rough, and "
        "no gain is predicted.",
        {"others_cores": taken, "own_cores": left, "cores": cores, "busy_frac": frac},
        advice="Run it again when they have ended.",
        is_note=True,
    )


def machine_was_slower(evidence: Evidence) -> Finding | None:
    """Returns a note if the ceiling contradicts the time spent on data and callbacks."""
    found, factor = contradiction(evidence.record), evidence.ceiling_factor
    if found is None or factor is None or workers_take_cores(evidence):  # crowding workers explain the slowness
        return None
    between = (frequent_logging, slow_callbacks, check_between_steps)
    if found.slower == "loop" and any(rule(evidence) for rule in between):
        return None
    text = f"The run reached {show_percent(1 / factor)} of its ceiling. {found.message}"
    advice = "Look at what is slower on that rank: its disk, its CPUs, other processes."
    figures: Figures = {"slower": found.slower, "data_frac": found.data_frac, "ceiling_factor": factor}
    if found.slower != "rank":
        others = evidence.telemetry.mean_others_cores
        if others is not None and evidence.cores:
            figures["others_cores"] = others
            text += f" Other programs took {others:.1f} of your {evidence.cores:g} cores."
        advice = "Run it again to know."
    return Finding("machine_was_slower", text, figures, advice=advice, is_note=True)


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
    advice = "More steps (trainer.max_steps), and nothing else at work on the machine, make it more certain."
    figures: Figures = {"half_interval_frac": half_frac}
    return Finding("steps_varied", f"Steps varied, so the rate is {known}.", figures, advice=advice, is_note=True)


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
    text = f"{evidence.swings.describe_utilisation()} "
    text += f"As often comes {' and '.join(due)}." if due else "Nothing that was set comes as often."
    text += f" Waiting for data, copies and callbacks took {show_percent(held_up_frac)} of the time."
    figures: Figures = {"gpu": gpu, "low_pct": swing.low, "high_pct": swing.high, "period_s": swing.period_s}
    advice = "Look at what the model does in some steps only, and at what else uses this GPU."
    return Finding("utilisation_swings", text, figures, lost_frac=idle_frac - held_up_frac, advice=advice)


_LR = "workload.optimizer.lr"


def loss_blows_up(evidence: Evidence) -> Finding | None:
    """Returns a finding if the training loss left its running median, or was not finite."""
    steps, values = evidence.losses
    events = [event for event in evidence.record.events if event["kind"] == "nan"]
    at = _first_jump(values)
    if not events and at is None:
        return None
    evidence_: Figures = {}
    if events:
        step, number = int(events[0].get("step") or 0), evidence.num_events("nan")
        text = f"The loss or gradients were not finite in {counted(number, 'step')}, first in step {step}"
        if events[-1].get("action") == "raise":
            text = f"The loss was not finite by step {step}, which ended the run"
        evidence_ |= {"non_finite_steps": number}
    else:
        assert at is not None
        step, median = int(steps[at]), float(np.median(values[max(0, at - limits.LOSS_WINDOW) : at]))
        now = float(values[at])
        text = f"The loss rose to {now:.4g} at step {step}, from a median of {median:.4g} before it"
        if not np.isfinite(now):
            text = f"The loss was not finite at step {step}"
        evidence_ |= {"loss": now, "median_before": median}
    ended = bool(events) and events[-1].get("action") == "raise"
    lr, named = _far_too_high(evidence), next((event for event in events if "sample" in event), None)
    if named is not None:
        where = f"epoch {named.get('epoch')}, batch {named.get('batch')}"
        cause = (
            f"training sample {named['sample']} holds {named.get('value', 'NaN')} ({where}). The data is the cause, "
            "not the learning rate: repair that sample, or leave it out"
        )
        skipped = [*(evidence.value("loader.skip_ids") or ()), named["sample"]]
        change: tuple[str, ...] = (f"loader.skip_ids=[{','.join(map(str, skipped))}]",)
    else:
        cause = "the learning rate is too high, or gradients are not clipped"
        cause = cause if lr is None else f"the learning rate of {lr:g} is far too high"
        change = _changes(evidence)
    return Finding(
        "loss_blows_up",
        f"{text}: {cause}.",
        {"step": step, **evidence_},
        change,
        advice="" if change else "Lower the learning rate, or clip gradients to a smaller norm.",
        changes_learning=True,
        lost_frac=1.0 if ended else None,
    )


def _changes(evidence: Evidence) -> tuple[str, ...]:
    """Returns one change: clipping first, then a lower rate. Clipping does not help if Adam's rate is far too high."""
    clip = "trainer.gradient_clip"
    if evidence.value(clip) is None and clip not in evidence.record.refused and _far_too_high(evidence) is None:
        return (f"{clip}=1.0",)
    lr = evidence.value(_LR)
    return (f"{_LR}={min(lr / 10, _highest(evidence)):g}",) if isinstance(lr, int | float) and lr > 0 else ()


def _far_too_high(evidence: Evidence) -> float | None:
    """Returns the learning rate if it alone explains the loss, else None."""
    lr = evidence.value(_LR)
    return lr if isinstance(lr, int | float) and lr > _highest(evidence) else None


def _highest(evidence: Evidence) -> float:
    """Returns the highest usual learning rate. Adam and its variants move each weight by about that much per step."""
    return 0.01 if "adam" in str(evidence.value("workload.optimizer._target_")).lower() else 1.0


def _first_jump(values: Series) -> int | None:
    """Returns the index of the first value that is not finite, or far above the median of those before it."""
    if len(values) <= limits.LOSS_WINDOW:
        return None
    later = values[limits.LOSS_WINDOW :]
    medians = np.median(sliding_window_view(values, limits.LOSS_WINDOW)[:-1], axis=1)
    # A factor has no meaning near zero or below.
    jumps = ~np.isfinite(later) | ((medians > 0) & (later > limits.LOSS_GROWTH * medians))
    return int(limits.LOSS_WINDOW + jumps.argmax()) if jumps.any() else None
