"""Words the curves of a CSV: how busy each GPU was, whether it swings, and the limits of the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wellfed.command_line import command
from wellfed.explain.diagnosis.curves.curve_verdict import CurveVerdict, verdict_of
from wellfed.explain.diagnosis.curves.recorded_curves import GpuCurve, RecordedCurves
from wellfed.explain.diagnosis.curves.swing import MIN_SAMPLES
from wellfed.units import counted, show_duration

_SHORTEST_READINGS = 3
"""Readings that the shortest period takes (`swing.swing_in_time`)."""
_COARSE_S, _SURE_READINGS = 0.75, 10
"""Seconds between readings that may hide a fast swing, and readings of a period that rule that out."""
CAUSES = "A curve shows how busy a GPU was, not why: causes need a run, whose steps are timed."


def curve_lines(file: RecordedCurves) -> list[str]:
    """Returns level, swing and verdict of each GPU, the next command, and the limits of the file."""
    verdicts = _verdicts(file)
    lines = [_about(file)]
    for curve, found in verdicts:
        name = f"GPU {curve.gpu}".rstrip() + (f" ({curve.card})" if curve.card else "")
        lines.append(f"{name}: {_said(found)}")
        lines += [f"  {line}" for line in filter(None, [found.in_use_message])]
    advised = dict.fromkeys(found.advice for _, found in verdicts if found.advice is not None)
    return [*lines, *_limits(file, verdicts), CAUSES, *advised]


def curve_entry(file: RecordedCurves) -> Mapping[str, Any]:
    """Returns the same as plain data; a GPU without readings of utilisation is None."""
    verdicts = _verdicts(file)
    entries = ((curve, found.entry()) for curve, found in verdicts)
    return {
        "writer": file.writer,
        "interval_s": file.interval_s,
        "unread_rows": file.unread,
        "out_of_order_rows": file.out_of_order,
        "gpus": {curve.gpu: None if entry is None else {"name": curve.card, **entry} for curve, entry in entries},
        "notes": [*_limits(file, verdicts), CAUSES],
    }


def _verdicts(file: RecordedCurves) -> list[tuple[GpuCurve, CurveVerdict]]:
    return [(curve, verdict_of(curve.time_s, curve.util_pct)) for curve in file.curves]


def _about(file: RecordedCurves) -> str:
    number = sum(len(curve.time_s) for curve in file.curves)
    parts = [f"Written by {file.writer}", counted(len(file.curves), "GPU"), counted(number, "reading")]
    if file.interval_s is not None:
        parts.append(f"one of each GPU every {show_duration(file.interval_s)}")
    if file.unread:
        parts.append(f"{counted(file.unread, 'row')} left out that can't be read")
    if file.out_of_order:
        rows = counted(file.out_of_order, "row")
        parts.append(f"{rows} left out because the clock went back (the longest stretch in order is kept)")
    return ", ".join(parts)


def _said(found: CurveVerdict) -> str:
    if found.whole is None:
        return f"{found.message}; some cards, and instances of a card (MIG), do not tell it"
    over = f"over {show_duration(found.whole.span_s)}"
    if found.rated is None:
        return f"{found.message} ({over})" if found.whole.is_idle else found.message
    level = found.whole
    figures = f"p5 {level.p5_pct:.0f} %, p95 {level.p95_pct:.0f} %, peak {level.peak_pct:.0f} %"
    return f"{found.message} ({figures}, {over})"


def _limits(file: RecordedCurves, verdicts: list[tuple[GpuCurve, CurveVerdict]]) -> list[str]:
    """Returns which curves are too short, or read too rarely, to show a swing."""
    judged = [found.rated for _, found in verdicts if found.rated is not None]
    doubtful = [level for level in judged if level.verdict != "well used"]
    if not doubtful or not file.interval_s:
        return []
    if all(level.num < MIN_SAMPLES for level in doubtful):
        return [f"Whether it swings can be told from {MIN_SAMPLES} readings of a GPU on: watch for longer."]
    sure_s = _SURE_READINGS * file.interval_s
    if file.interval_s < _COARSE_S or all(level.swing and level.swing.period_s >= sure_s for level in doubtful):
        return []
    shortest_s = show_duration(_SHORTEST_READINGS * file.interval_s)
    often = "nvidia-smi -lms 200" if file.writer == "nvidia-smi" else "a shorter interval"
    return [
        f"Readings {show_duration(file.interval_s)} apart can't show a period under {shortest_s}: a faster swing looks "
        f"slower than it is, or like none. Read more often: {often}, {command('monitor')}."
    ]
