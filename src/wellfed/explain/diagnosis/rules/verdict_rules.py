"""Rates a run as a whole: too short, disturbed by other programs, at its ceiling, unexplained, a loss that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.ceiling_check import contradiction, explanation
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.gains.feeding import is_starved, workers_take_cores
from wellfed.explain.diagnosis.rules.feeding_rules import slow_start
from wellfed.explain.diagnosis.rules.pause_rules import check_between_steps, frequent_logging, slow_callbacks
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import show_phases
from wellfed.observe.telemetry.machines import HOST, named
from wellfed.record import WallEntry
from wellfed.units import counted, show_count, show_percent


def too_few_steps(evidence: Evidence) -> Finding | None:
    """Returns a note if too few steps ran to judge the speed."""
    measured = evidence.steps.num_measured
    if measured >= limits.FEWEST_STEPS and evidence.record.time is not None:
        return None
    text = f"{counted(measured, 'step')} after the warm-up" if measured else "No step was measured after the warm-up"
    more = "give the run more steps (trainer.max_steps, trainer.max_epochs)"
    if evidence.record.status == "running":
        more = "ask again when the run has come further"
    return Finding(
        "too_few_steps",
        f"{text}: {'that is ' if measured else ''}too little to say where time is lost. "
        f"It takes {limits.FEWEST_STEPS}: {more}.",
        {"steps_measured": measured},
        is_note=True,
    )


def busy_machine(evidence: Evidence) -> Finding | None:
    """Returns a finding if in many readings the cores were full and others used a large part of them. None if the run
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
    text = f"Don't judge this run: other programs took {taken:.1f} of your {cores:g} cores{when}"
    return Finding(
        "busy_machine",
        f"{text}; this run got {left:.1f}. Run it again when they have ended. No gain can be predicted from this run.",
        {"others_cores": taken, "own_cores": left, "cores": cores, "busy_frac": frac},
        lost_frac=frac * taken / cores,
    )


def machine_was_slower(evidence: Evidence) -> Finding | None:
    """Returns a note if the ceiling contradicts the time spent on data and callbacks."""
    found, factor = contradiction(evidence.record), evidence.ceiling_factor
    if found is None or factor is None or workers_take_cores(evidence):  # crowding workers explain the slowness
        return None
    between = (frequent_logging, slow_callbacks, check_between_steps)
    if found.slower == "loop" and any(rule(evidence) for rule in between):
        return None
    unit = evidence.record.throughput["sample_unit"] if evidence.record.throughput else "samples"
    text = f"The run reached {show_percent(1 / factor)} of its ceiling. {explanation(found, unit)}"
    figures: Figures = {"slower": found.slower, "data_frac": found.data_frac, "ceiling_factor": factor}
    if found.slower != "rank":
        others = evidence.telemetry.mean_others_cores
        if others is not None and evidence.cores:
            figures["others_cores"] = others
            text += f" Other programs took {others:.1f} of your {evidence.cores:g} cores."
        text += " Run it again to know."
    return Finding("machine_was_slower", text, figures, is_note=True)


_MOSTLY = 0.8


def unexplained(evidence: Evidence) -> Finding | None:
    """Returns how much time is lost, and how to find the cause. For runs without other findings."""
    factor, wait_frac, throughput = evidence.ceiling_factor, evidence.wait_frac, evidence.record.throughput
    advice = "debug=profiler shows what a step spends its time on."
    upper = 1.0  # end of the rate's interval over the rate
    if throughput and throughput["ci95"] and throughput["samples_per_s"] > 0:
        upper = throughput["ci95"][1] / throughput["samples_per_s"]
    is_below = factor is not None and factor > limits.CEILING_FACTOR * upper
    if wait_frac > limits.WAIT_FRAC and (is_below or is_starved(evidence)) and _epoch_start_frac(evidence) >= _MOSTLY:
        text = f"{show_percent(wait_frac)} of training waits for data, nearly all of that in the first steps of each"
        text += " epoch: nothing is built ahead across its end. Longer epochs lose less."
        return Finding("unexplained", text, {"wait_frac": wait_frac}, lost_frac=wait_frac)
    if is_starved(evidence):
        text = f"{show_percent(wait_frac)} of each step waits for data, and the cause of the delay is unknown"
        return Finding("unexplained", f"{text}. {advice}", {"wait_frac": wait_frac}, lost_frac=wait_frac)
    if factor is None or not is_below:
        return None
    text = f"The run reached {show_percent(1 / factor)} of its ceiling, and no cause was recognised. {advice}"
    return Finding("unexplained", text, {"ceiling_factor": factor}, lost_frac=1 - 1 / factor)


def _epoch_start_frac(evidence: Evidence) -> float:
    """Returns the share of all waiting in the first steps of later epochs, one for each worker."""
    starts = np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    if not evidence.num_workers or not len(starts):
        return 0.0
    indices = np.unique((starts[:, None] + np.arange(evidence.num_workers)).ravel())
    waited_ms = evidence.steps.wait_ms
    return float(waited_ms[indices[indices < len(waited_ms)]].sum() / max(waited_ms.sum(), 1e-9))


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
_KNOWN_FRAC = 0.8
"""Share of the wall time in steps at the ceiling's rate and in a slow start, beyond which there is no note."""
_MOST_NAMED, _LEAST_NAMED_FRAC = 3, 0.01


def unknown(evidence: Evidence) -> Finding | None:
    """Returns a note why it is unknown whether the run is at its ceiling. For runs without other findings."""
    text, figures = _reason(evidence)
    return Finding("unknown", f"{text}.", {"wait_frac": evidence.wait_frac, **figures}, is_note=True) if text else None


def _reason(evidence: Evidence) -> tuple[str, dict[str, float]]:
    throughput, factor = evidence.record.throughput, evidence.ceiling_factor
    rate = throughput["samples_per_s"] if throughput else 0.0
    low, high = (throughput["ci95"] or (rate, rate)) if throughput else (0.0, 0.0)
    if throughput and (high - low) / 2 > limits.WIDEST_HALF_FRAC * rate:
        text = (
            f"Unknown whether it could be faster: steps varied too much. {show_count(rate)} "
            f"{throughput['sample_unit']}/s has a 95 % interval from {show_count(max(0.0, low))} to {show_count(high)}."
            " More steps (trainer.max_steps), and nothing else at work on the machine, make it narrower"
        )
        return text, {"ci95_low": low, "ci95_high": high}
    if factor is None:
        text = "Unknown whether it could be faster: no ceiling was measured. Nothing else that costs time was found"
        text += f"; {show_percent(evidence.wait_frac)} of a step waits for data"
        phases = show_phases(evidence.record.time)
        return (f"{text}, and the passes take: {phases}" if phases else text), {}
    figures = {"of_ceiling_frac": 1 / factor}
    if factor > limits.CEILING_FACTOR:
        text = (
            f"Unknown how near it is to its ceiling: {show_percent(1 / factor)} of it, but the rate is known no better "
            f"than {show_percent(low / rate / factor)} to {show_percent(high / rate / factor)} of it"
        )
        return text, figures
    data_frac = evidence.wait_frac + evidence.copy_frac
    if data_frac > (limits.WAIT_FRAC if factor <= 1 else 1 - limits.LEAST_AT_CEILING_FRAC):
        text = (
            f"Unknown whether it could be faster: {show_percent(data_frac)} of a step went into data, and yet the same "
            f"steps without data were only {factor:.2f} times as fast. Either may be off; more steps "
            "(trainer.max_steps) would show which"
        )
        return text, {**figures, "data_frac": data_frac}
    wall, frac = evidence.wall.entry, evidence.wall.at_ceiling_frac
    if wall is None or frac is None:
        text = f"Unknown whether it could be faster: its steps reached {show_percent(1 / factor)} of the ceiling"
        return f"{text}, and what passed between them was not measured", figures
    is_slow_start = slow_start(evidence) is not None  # reported by that rule
    is_known = is_slow_start and frac + evidence.wall.once_s / wall["total_s"] >= _KNOWN_FRAC
    if frac < limits.LEAST_AT_CEILING_FRAC and not is_known:
        text = f"Unknown whether it could be faster: {show_percent(frac)} of the wall time of training went into steps"
        named = beside_steps(wall, {"callbacks": sum(wall["callbacks"].values())}, _MOST_NAMED)
        rest = ", ".join(named) or "slow first steps"
        return f"{text} at the ceiling's rate. The rest: {rest}", {**figures, "at_ceiling_frac": frac}
    return "", {}


def beside_steps(wall: WallEntry, hooks: Mapping[str, float], most: int) -> list[str]:
    """Returns the kinds of wall time beside steps with their shares, the largest first. ``hooks``: seconds by name."""
    spent_s = {**{name: wall[key] for key, name in WALL_NAMES.items()}, **hooks}  # type: ignore[literal-required]
    shares = {name: one_s / wall["total_s"] for name, one_s in spent_s.items()}
    largest = sorted(shares, key=lambda name: -shares[name])[:most]
    return [f"{name} {show_percent(shares[name])}" for name in largest if shares[name] >= _LEAST_NAMED_FRAC]


def healthy(evidence: Evidence) -> Finding | None:
    """Returns the note if at least `LEAST_AT_CEILING_FRAC` of the wall time was spent in such steps."""
    factor, frac = evidence.ceiling_factor, evidence.wall.at_ceiling_frac
    if factor is None or frac is None or frac < limits.LEAST_AT_CEILING_FRAC:
        return None
    if factor <= 1:
        if evidence.wait_frac + evidence.copy_frac > limits.WAIT_FRAC:  # `unknown` reports the contradiction
            return None
        text = "Stop tuning: this run is as fast as with all its data on the device"
    else:
        text = f"Stop tuning: {show_percent(1 / factor)} of the ceiling, and nothing that costs time was found"
    figures = {"wait_frac": evidence.wait_frac, "of_ceiling_frac": 1 / factor, "at_ceiling_frac": frac}
    return Finding("healthy", f"{text}.", figures, is_note=True)


_EXPLAINED_FRAC = 0.5
"""Share of idle time in waiting, copies and the loop, beyond which their rules explain it."""


def utilisation_swings(evidence: Evidence) -> Finding | None:
    """Returns levels and period of the swing, and settings with the same period."""
    gpu = _deepest(evidence)
    if gpu is None:
        return None
    curve = evidence.telemetry.curve("util_pct", gpu)
    low, high = (float(level) for level in np.percentile(curve, (5, 95)))
    idle_frac = 1 - float(curve.mean()) / high
    host_frac = evidence.record.time["host_frac"] if evidence.record.time else 0.0
    held_up_frac = evidence.wait_frac + evidence.copy_frac + host_frac
    if held_up_frac >= _EXPLAINED_FRAC * idle_frac:
        return None
    figures: Figures = {"gpu": named(gpu), "low_pct": low, "high_pct": high}
    deepest, text = evidence.swings.deepest, evidence.swings.describe_utilisation()
    if deepest is None or text is None:
        levels = f"between {low:.0f} % and {high:.0f} %"
        text = f"The utilisation of GPU {named(gpu)} goes up and down {levels}, without a period."
    else:
        figures["period_s"] = deepest[1].period_s
        due = evidence.swings.settings_with_period(deepest[1].period_s)
        text += f" As often comes {' and '.join(due)}." if due else " Nothing that was set comes as often."
    if evidence.record.time is not None:
        text += f" Waiting for data, copies and callbacks took {show_percent(held_up_frac)} of the time: look at what "
        text += "the model does in some steps only, and at what else uses this GPU."
    return Finding("utilisation_swings", text, figures, lost_frac=idle_frac - held_up_frac)


def _deepest(evidence: Evidence) -> int | None:
    """Returns the GPU that swings most, with a period if there is one; None without a swing."""
    if evidence.swings.deepest is not None:
        return evidence.swings.deepest[0]
    for gpu in evidence.telemetry.gpus:
        curve = evidence.telemetry.curve("util_pct", gpu)
        if len(curve) >= limits.FEWEST_READINGS:
            low, high = np.percentile(curve, (5, 95))
            if high >= limits.BUSY_PCT and low < limits.IDLE_PCT:
                return gpu
    return None


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
    named = next((event for event in events if isinstance(event.get("sample"), int)), None)
    if named is not None:
        return _of_data(evidence, named, text, {"step": step, **evidence_})
    lr = _far_too_high(evidence)
    cause = "the learning rate is too high, or gradients are not clipped"
    return Finding(
        "loss_blows_up",
        f"{text}: {cause if lr is None else f'the learning rate of {lr:g} is far too high'}.",
        {"step": step, **evidence_},
        _changes(evidence),
        changes_learning=True,
        lost_frac=1.0 if events and events[-1].get("action") == "raise" else None,
    )


def _of_data(evidence: Evidence, named: Mapping[str, Any], text: str, figures: Figures) -> Finding:
    sample, ended = named["sample"], named.get("action") == "raise"
    where = f"epoch {named.get('epoch')}, batch {named.get('batch')}"
    skipped = [*(evidence.value("loader.skip_ids") or ()), sample]
    return Finding(
        "loss_blows_up",
        f"{text}: training sample {sample} holds {named.get('value', 'NaN')} ({where}). The data is the cause, not the "
        "learning rate: repair that sample, or leave it out.",
        {**figures, "sample": sample},
        (f"loader.skip_ids=[{','.join(map(str, skipped))}]",),
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
