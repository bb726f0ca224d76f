"""Writes the page of two runs from its template, ``comparison.html.j2``, with curves over each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Axis, Bar, Chart, ChartCurve, Colour, Key, PagePicture, bars, limits
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.report.comparison import Comparison, device
from wellfed.explain.report.pictures.picture_parts import binned, readings
from wellfed.explain.report.pictures.run_pictures import MOST_METRICS
from wellfed.explain.report.pictures.step_time_picture import PARTS
from wellfed.observe.telemetry.series import HOST
from wellfed.units import show_ms

_COLOURS: tuple[Colour, ...] = ("three", "one")
Runs = dict[str, Evidence]
"""Letter of a run -> its evidence."""


def comparison_html(both: Comparison) -> str:
    """Returns the page of A beside B, with all texts escaped."""
    runs = {"A": both.a, "B": both.b}
    return fill_in(
        Path(__file__).with_name("comparison.html.j2"),
        {
            "runs": {letter: run.record for letter, run in runs.items()},
            "colours": dict(zip(runs, _COLOURS, strict=True)),
            "verdict": both.verdict,
            "caveats": [line for line in both.caveats if line not in both.verdict],
            "both": both,
            "device": device,
            "pictures": [*_mean_step(both), *_busy(runs), *_steps(runs), *_metrics(runs)],
        },
    )


def _mean_step(both: Comparison) -> Iterator[PagePicture]:
    """Draws the parts of a step of each run as bars, if any was timed."""
    rows, told = [], []
    for letter, found in zip("AB", both.parts, strict=True):
        shown = [(colour, found[name].value, name) for name, colour in PARTS.items() if name in found]
        rows.append(Bar(letter, shown, show_ms(sum(ms for _, ms, _ in shown)) if shown else "not timed"))
        told.append(f"{letter}: " + ", ".join(f"{name} {show_ms(one.value)}" for name, one in found.items()))
    if any(row.parts for row in rows):
        image = bars(rows, f"Parts of a mean step. {'; '.join(told)}.")
        names = dict.fromkeys((name, colour) for row in rows for colour, _, name in row.parts)
        yield PagePicture("Mean step", image=image, more_keys=[Key(colour, name, "area") for name, colour in names])


def _busy(runs: Runs) -> Iterator[PagePicture]:
    """Draws the load while the runs trained: mean utilisation of the GPUs, or cores."""
    on_gpu = any(run.telemetry.gpus for run in runs.values())
    name = "util_pct" if on_gpu else "cpu_pct"
    what, unit, scale = ("GPU utilisation", "%", 1.0) if on_gpu else ("CPU cores busy", "cores", 0.01)
    shown, told = {}, []
    for letter, run in runs.items():
        each = [*readings(run.curves, name, run.telemetry.gpus if on_gpu else [HOST]).values()]
        if each:
            at_s = each[0][0]
            busy = scale * np.mean([np.interp(at_s, *curve) for curve in each], axis=0)
            shown[letter] = (at_s - at_s[0], busy)
            told.append(f"{letter}: mean {busy.mean():.0f} %" if on_gpu else f"{letter}: mean {busy.mean():.2f}")
    if not shown:
        return
    axis = Axis(0.0, max(float(at_s[-1]) for at_s, _ in shown.values()), "since training began", "time")
    top = 100.0 if on_gpu else 1.05 * max(float(busy.max()) for _, busy in shown.values())
    chart = Chart(
        unit, axis, _overlaid(runs, shown), top, told=f"{what} while training. {'; '.join(told)}.", height=180
    )
    missing = ", ".join(letter for letter in runs if letter not in shown)
    yield PagePicture(what, [chart], caption=f"{missing}: not watched." if missing else "")


def _steps(runs: Runs) -> Iterator[PagePicture]:
    times = {
        letter: (run.all_steps["step"], run.steps.all_ms)
        for letter, run in runs.items()
        if len(run.steps.all_ms) > 1 and len(run.all_steps.get("step", ())) == len(run.steps.all_ms)
    }
    curves = _overlaid(runs, times)
    if curves:
        top = 2.5 * max(float(np.percentile(ms, 95)) for _, ms in times.values())
        top = min(top, 1.05 * max(float(ms.max()) for _, ms in times.values())) or 1.0
        axis = Axis(*limits(np.concatenate([steps for steps, _ in times.values()]), 0.0), "step")
        told = "; ".join(f"{letter}: mean {show_ms(float(ms.mean()))}" for letter, (_, ms) in times.items())
        chart = Chart("ms", axis, curves, top, told=f"Time of each step. {told}.", height=160, is_linked=True)
        yield PagePicture("Time of a step, over steps", [chart])


def _metrics(runs: Runs) -> Iterator[PagePicture]:
    names = dict.fromkeys(key for run in runs.values() for key in run.metrics if key[0] != "throughput")
    shown = [key for key in names if any(len(run.metrics.get(key, ((),))[0]) > 1 for run in runs.values())]
    for key in shown[:MOST_METRICS]:
        curves = _overlaid(runs, {letter: run.metrics[key] for letter, run in runs.items() if key in run.metrics})
        steps, values = (np.concatenate([getattr(curve, of) for curve in curves]) for of in "xy")
        low, high = limits(values)
        axis, told = Axis(*limits(steps, 0.0), "step"), f"{'/'.join(key)} over steps."
        chart = Chart("", axis, curves, high, low, told, height=140, is_linked=True)
        yield PagePicture(f"{'/'.join(key)}, over steps", [chart])


def _overlaid(runs: Runs, tables: Mapping[str, tuple[Series, Series]]) -> list[ChartCurve]:
    """Returns the curve of each run that has one, in its colour."""
    colours = zip(runs, _COLOURS, strict=False)
    return [binned(*tables[letter], letter, colour) for letter, colour in colours if letter in tables]
