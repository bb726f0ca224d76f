"""Writes the page of two runs from its template, ``comparison.html.j2``, with curves over each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wellfed.explain.pages.chart import Bar, Key, PagePicture, bars
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.report.comparison import Comparison, device
from wellfed.explain.report.figures import PARTS
from wellfed.explain.report.pictures.run_pictures import metrics
from wellfed.explain.report.pictures.step_time_picture import COLOURS
from wellfed.units import show_ms


def comparison_html(both: Comparison) -> str:
    """Returns the page of A beside B, with all texts escaped."""
    runs = {"A": both.a, "B": both.b}
    return fill_in(
        Path(__file__).with_name("comparison.html.j2"),
        {
            "runs": {letter: run.record for letter, run in runs.items()},
            "colours": {"A": "three", "B": "one"},
            "verdict": both.verdict,
            "caveats": [line for line in both.caveats if line not in both.verdict],
            "both": both,
            "device": device,
            "pictures": [*_mean_step(both), *metrics(runs)],
        },
    )


def _mean_step(both: Comparison) -> Iterator[PagePicture]:
    """Draws the parts of a step of each run as bars, if any was timed."""
    rows = []
    for letter, figures in zip("AB", both.of_each, strict=True):
        found = {name: figures[name].estimate for name in PARTS if name in figures}
        parts = [(COLOURS[name], part.value, name) for name, part in found.items() if part]
        rows.append(Bar(letter, parts, figures["step"].text if "step" in figures else "not timed"))
    if any(row.parts for row in rows):
        told = (f"{row.label}: " + ", ".join(f"{name} {show_ms(ms)}" for _, ms, name in row.parts) for row in rows)
        keys = dict.fromkeys(Key(colour, name, "area") for row in rows for colour, _, name in row.parts)
        yield PagePicture("Mean step", image=bars(rows, f"Parts of a mean step. {'; '.join(told)}."), more_keys=[*keys])
