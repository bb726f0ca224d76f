"""Finds a loss that grew far beyond its earlier values, or was not a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import LOSS_GROWTH, LOSS_WINDOW
from wellfed.units import counted

_LR = "workload.optimizer.lr"


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the training loss left its running median, or was not finite."""
    steps, values = evidence.losses
    events = [event for event in evidence.record.events if event["kind"] == "nan"]
    at = _first_jump(values)
    if not events and at is None:
        return None
    evidence_: Figures = {}
    if events:
        step = int(events[0].get("step") or 0)
        text = f"The loss was not finite in {counted(len(events), 'step')}, first in step {step}"
        if events[-1].get("action") == "raise":
            text = f"The loss was not finite by step {step}, which ended the run"
        evidence_ |= {"non_finite_steps": len(events)}
    else:
        assert at is not None
        step, median = int(steps[at]), float(np.median(values[max(0, at - LOSS_WINDOW) : at]))
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
    """Returns the finding for a batch with a sample that is not finite."""
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
    if evidence.value("trainer.gradient_clip") is None and _far_too_high(evidence) is None:
        return ("trainer.gradient_clip=1.0",)
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
    if len(values) <= LOSS_WINDOW:
        return None
    medians, later = np.median(sliding_window_view(values, LOSS_WINDOW)[:-1], axis=1), values[LOSS_WINDOW:]
    # A factor has no meaning near zero or below.
    jumps = ~np.isfinite(later) | ((medians > 0) & (later > LOSS_GROWTH * medians))
    return int(LOSS_WINDOW + jumps.argmax()) if jumps.any() else None
