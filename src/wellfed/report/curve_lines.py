"""Puts what a CSV of GPU curves shows into lines: how busy each GPU was, if it swings, and what that can't tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wellfed.diagnosis.level import Level, level_of
from wellfed.diagnosis.recorded_curves import GpuCurve, RecordedCurves
from wellfed.diagnosis.swing import MIN_SAMPLES
from wellfed.units import counted, show_duration

_SHORTEST_READINGS = 3
"""Readings that the shortest period takes (`swing.swing_in_time`)."""
_COARSE_S, _SURE_READINGS = 0.75, 10
"""Readings so far apart may hide a swing of seconds; a period of so many readings is no faster one in disguise."""
CAUSES = "A curve shows how busy a GPU was, not why: causes need a run, whose steps are timed."


def curve_lines(file: RecordedCurves) -> list[str]:
    """Level, swing and verdict of each GPU, what to type next, and what the file can't tell."""
    levels = _levels(file)
    lines = [_about(file)]
    for curve, level in levels:
        name = f"GPU {curve.gpu}".rstrip() + (f" ({curve.card})" if curve.card else "")
        lines.append(f"{name}: {_said(level)}")
    advised = dict.fromkeys(level.advice for _, level in levels if level is not None and not level.is_idle)
    return [*lines, *_limits(file, levels), CAUSES, *advised]


def curve_entry(file: RecordedCurves) -> Mapping[str, Any]:
    """The same as plain data; a GPU of which no utilisation was read is None."""
    levels = _levels(file)
    return {
        "writer": file.writer,
        "interval_s": file.interval_s,
        "unread_rows": file.unread,
        "gpus": {
            curve.gpu: None if level is None else {"name": curve.card, **level.entry()} for curve, level in levels
        },
        "notes": [*_limits(file, levels), CAUSES],
    }


def _levels(file: RecordedCurves) -> list[tuple[GpuCurve, Level | None]]:
    return [(curve, level_of(curve.time_s, curve.util_pct)) for curve in file.curves]


def _about(file: RecordedCurves) -> str:
    number = sum(len(curve.time_s) for curve in file.curves)
    parts = [f"Written by {file.writer}", counted(len(file.curves), "GPU"), counted(number, "reading")]
    if file.interval_s is not None:
        parts.append(f"one of each GPU every {show_duration(file.interval_s)}")
    if file.unread:
        parts.append(f"{counted(file.unread, 'row')} left out that can't be read")
    return ", ".join(parts)


def _said(level: Level | None) -> str:
    if level is None:
        return "no utilisation was read; some cards, and instances of a card (MIG), do not tell it"
    if level.is_idle:
        return f"nothing ran on it (over {show_duration(level.span_s)})"
    figures = f"p5 {level.p5_pct:.0f} %, p95 {level.p95_pct:.0f} %, peak {level.peak_pct:.0f} %"
    return f"{level.message} ({figures}, over {show_duration(level.span_s)})"


def _limits(file: RecordedCurves, levels: list[tuple[GpuCurve, Level | None]]) -> list[str]:
    """What was too little, or read too rarely, to tell a swing."""
    judged = [level for _, level in levels if level is not None and not level.is_idle]
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
        f"slower than it is, or like none. Read more often: {often}, python -m wellfed monitor."
    ]
