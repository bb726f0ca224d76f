"""Writes the page of two runs side by side from its template, ``comparison.html.j2``, and draws its pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from markupsafe import Markup

from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.pages.picture import ACCENT, INK, SERIES, no_pictures, picture
from wellfed.explain.report.comparison import PARTS, Comparison, Estimate, device
from wellfed.explain.report.pictures.picture_parts import binned, curve, readings
from wellfed.observe.telemetry.machines import HOST, named
from wellfed.units import show_ms

_WIDTH = 5.7
"""Inches of 72 pixels: text is readable on a phone, and two pictures stand side by side on a desk."""


def comparison_html(both: Comparison) -> str:
    """Returns the page, with all texts escaped."""
    drawn = () if no_pictures() else (_step_picture(both), _busy_picture(both))
    return fill_in(
        Path(__file__).with_name("comparison.html.j2"),
        {
            "both": both,
            "sides": list(zip("AB", both.records, both.findings, strict=True)),
            "device": device,
            "pictures": [each for each in drawn if each],
        },
    )


def _step_picture(both: Comparison) -> Markup | None:
    """Draws the parts of a step of each run as bars; None if neither was timed."""
    parts = dict(zip("AB", both.parts, strict=True))
    shown = [name for name in PARTS if any(name in found for found in parts.values())]
    if not shown:
        return None
    with picture(_WIDTH, 1.7) as drawn:
        axes = drawn.figure.add_subplot()
        ends_ms = np.zeros(2)
        for name in shown:
            mean_ms = np.array([found.get(name, Estimate(0.0)).value for found in parts.values()])
            axes.barh([0, 1], mean_ms, left=ends_ms, height=0.6, color=SERIES[PARTS.index(name)], label=name)
            ends_ms += mean_ms
        axes.set_yticks([0, 1], list(parts), weight="bold")
        axes.invert_yaxis()
        axes.set_xlabel("mean step, ms")
        drawn.figure.legend(loc="outside upper left", ncols=len(shown), handlelength=1.0)
        told = (
            f"{letter}: " + ", ".join(f"{name} {show_ms(one.value)}" for name, one in found.items())
            for letter, found in parts.items()
        )
        drawn.told = f"Parts of a mean step. {'; '.join(told)}."
    return drawn.svg


def _busy_picture(both: Comparison) -> Markup | None:
    """Draws the utilisation while each run trained, on the same axes; None if neither was watched."""
    name = "util_pct" if both.a.gpus or both.b.gpus else "cpu_pct"
    curves = [readings(one.curves, name, one.gpus if name == "util_pct" else [HOST]) for one in (both.a, both.b)]
    if not any(curves):
        return None
    what, unit, scale = ("GPU utilisation", "%", 1.0) if name == "util_pct" else ("CPU cores busy", "cores", 0.01)
    highest = max(float(busy_pct.max()) for found in curves for _, busy_pct in found.values())
    cores = [one.record.machine.get("cpu_quota_cores") or 0.0 for one in (both.a, both.b)]
    top = 100.0 if name == "util_pct" else max(*cores, scale * highest)
    with picture(_WIDTH, 3.4) as drawn:
        rows = drawn.figure.subplots(2, sharex=True, sharey=True)
        told = []
        for letter, axes, found in zip("AB", rows, curves, strict=True):
            for place, (gpu, (at_s, busy_pct)) in enumerate(found.items()):
                colour = ACCENT if len(found) == 1 else SERIES[place % len(SERIES)]
                curve(axes, binned(at_s - at_s[0], scale * busy_pct), colour, shade=0.2)
                of = "" if gpu == HOST else f"GPU {named(gpu)} "
                mean = scale * float(np.mean(busy_pct))
                told.append(f"{letter}: {of}mean {mean:.0f} %" if unit == "%" else f"{letter}: mean {mean:.2f}")
            axes.set_ylim(0, 1.05 * top)
            axes.set_ylabel(f"{letter}, {unit}")
            axes.grid(color=INK, alpha=0.12, linewidth=0.7)
            if not found:
                axes.text(0.5, 0.5, "not watched", transform=axes.transAxes, ha="center", va="center", color=INK)
        rows[-1].set_xlim(left=0)
        rows[-1].set_xlabel(f"{what}: seconds since training began")
        drawn.told = f"{what} while training. {'; '.join(told)}."
    return drawn.svg
