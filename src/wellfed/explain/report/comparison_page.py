"""Writes the page of two runs side by side from its template, ``comparison.html.j2``, and draws its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wellfed.explain.pages.chart import Axis, Bar, Chart, Colour, Key, PagePicture, bars
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.report.comparison import PARTS, Comparison, device
from wellfed.explain.report.pictures import step_time_picture
from wellfed.explain.report.pictures.picture_parts import binned, readings
from wellfed.observe.telemetry.machines import HOST, named
from wellfed.units import show_ms

_COLOURS: tuple[Colour, ...] = ("three", "one")
"""Colours of the runs."""


def comparison_html(both: Comparison) -> str:
    """Returns the page, with all texts escaped."""
    return fill_in(
        Path(__file__).with_name("comparison.html.j2"),
        {
            "both": both,
            "sides": list(zip("AB", both.records, both.findings, strict=True)),
            "device": device,
            "pictures": [*_step_picture(both), *_busy_picture(both)],
        },
    )


def _step_picture(both: Comparison) -> Iterator[PagePicture]:
    """Draws the parts of a step of each run as bars, if any was timed."""
    rows, told = [], []
    for letter, found in zip("AB", both.parts, strict=True):
        shown = [(step_time_picture.PARTS[name], found[name].value, name) for name in PARTS if name in found]
        rows.append(Bar(letter, shown, show_ms(sum(ms for _, ms, _ in shown)) if shown else "not timed"))
        told.append(f"{letter}: " + ", ".join(f"{name} {show_ms(one.value)}" for name, one in found.items()))
    if any(row.parts for row in rows):
        image = bars(rows, f"Parts of a mean step. {'; '.join(told)}.")
        names = dict.fromkeys((name, colour) for row in rows for colour, _, name in row.parts)
        yield PagePicture("Mean step", image=image, more_keys=[Key(colour, name, "area") for name, colour in names])


def _busy_picture(both: Comparison) -> Iterator[PagePicture]:
    """Draws the utilisation while the runs trained, each over the other; nothing if none was watched."""
    name = "util_pct" if both.a.gpus or both.b.gpus else "cpu_pct"
    curves = [readings(one.curves, name, one.gpus if name == "util_pct" else [HOST]) for one in (both.a, both.b)]
    if not any(curves):
        return
    what, unit, scale = ("GPU utilisation", "%", 1.0) if name == "util_pct" else ("CPU cores busy", "cores", 0.01)
    highest = max(float(busy_pct.max()) for found in curves for _, busy_pct in found.values())
    cores = [one.record.machine.get("cpu_quota_cores") or 0.0 for one in (both.a, both.b)]
    top = 100.0 if name == "util_pct" else max(*cores, scale * highest)
    lasted_s = max(float(at_s[-1] - at_s[0]) for found in curves for at_s, _ in found.values())
    charts, told = [], []
    for letter, found in zip("AB", curves, strict=True):
        for gpu, (_, busy_pct) in found.items():
            of, mean = "" if gpu == HOST else f"GPU {named(gpu)} ", scale * float(np.mean(busy_pct))
            told.append(f"{letter}: {of}mean {mean:.0f} %" if unit == "%" else f"{letter}: mean {mean:.2f}")
    gpus = list(dict.fromkeys(gpu for found in curves for gpu in found))
    for gpu in gpus:
        shown = [
            binned(found[gpu][0] - found[gpu][0][0], scale * found[gpu][1]).curve(letter, colour)
            for letter, colour, found in zip("AB", _COLOURS, curves, strict=True)
            if gpu in found
        ]
        charts.append(
            Chart(
                title=f"GPU {named(gpu)}" if len(gpus) > 1 else "",
                unit=unit,
                axis=Axis(0.0, lasted_s, "since training began", "time"),
                curves=shown,
                top=top,
                told=f"{what} while training. {'; '.join(told)}." if gpu == gpus[0] else "",
                height=max(60, 180 // len(gpus)),
                is_labelled=gpu == gpus[-1],
                is_linked=True,
            )
        )
    missing = ", ".join(letter for letter, found in zip("AB", curves, strict=True) if not found)
    yield PagePicture(what, charts, caption=f"{missing}: not watched." if missing else "")
