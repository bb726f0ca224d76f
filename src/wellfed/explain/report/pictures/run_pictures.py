"""Collects the pictures of a report by section: of tables, of metrics, or PNG files of the workload's evaluation."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import phase_shares
from wellfed.explain.pages.chart import SERIES, Axis, Bar, Chart, Colour, Key, PagePicture, bars, limits
from wellfed.explain.report.figures import PARTS
from wellfed.explain.report.pictures.machine_pictures import cpus, memory, ranks_side_by_side, utilisation
from wellfed.explain.report.pictures.picture_parts import PAUSES, TimeAxis, binned
from wellfed.explain.report.pictures.step_time_picture import COLOURS, step_time
from wellfed.explain.report.run_lines import own_files, show_figure
from wellfed.record.entries import RunRecord
from wellfed.units import MIB, show_duration, show_percent

MOST_PICTURES, MOST_BYTES = 8, MIB
"""Most pictures in a page, and bytes of each; others are named only."""
MOST_METRICS = 9
"""Most metrics with a picture; all are in the table."""
_LEAST_FRAC = 0.002
"""Share of the time below which a part is left out."""


def pictures(evidence: Evidence, folder: Path) -> Mapping[str, Any]:
    """Returns the pictures of a run by their section, and ``axis``, the time axis of the linked ones."""
    axis = TimeAxis.of(evidence)
    return {
        "axis": axis,
        "life": list(life(evidence)),
        "utilisation": [*utilisation(evidence, axis), *cpus(evidence, axis)],
        "time": [*step_time(evidence, axis), *ranks_side_by_side(evidence)],
        "memory": list(memory(evidence, axis)),
        "metrics": list(metrics({"": evidence})),
        "files": list(own_pictures(evidence.record, folder)),
    }


def life(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws start, parts of the steps, time between steps, and other phases; nothing of a run without a time."""
    spent = [one for one in _parts(evidence) if one[1] > 0]
    known_s = sum(seconds for _, seconds, _ in spent)
    total_s = max(evidence.record.duration_s, known_s)
    if not spent or total_s <= 0:
        return
    spent.append(("ink", total_s - known_s, "other"))
    parts: list[tuple[Colour, float, str]] = [
        (colour, seconds, f"{name} {show_duration(seconds)}, {show_percent(seconds / total_s)}")
        for colour, seconds, name in spent
        if seconds >= _LEAST_FRAC * total_s
    ]
    image = bars([Bar("", parts)], f"Time of the run: {'; '.join(text for *_, text in parts)}.", total_s)
    keys = [Key(colour, text, "area") for colour, _, text in parts]
    yield PagePicture(f"Where {show_duration(total_s)} went", image=image, more_keys=keys)


def _parts(evidence: Evidence) -> Iterator[tuple[Colour, float, str]]:
    record, time, wall = evidence.record, evidence.record.time, evidence.wall.entry
    yield "soft", sum(seconds for seconds in record.before_training.values() if isinstance(seconds, float)), "start"
    training_s = record.phases["train"]["total_s"] if "train" in record.phases else 0.0
    steps_s = training_s if wall is None else min(training_s, wall["steps_s"])
    if time:
        for name in PARTS:
            phases = phase_shares(time) if name == "compute" else {}
            for part, share in (phases or {name: time[f"{name}_frac"]}).items():  # type: ignore[literal-required]
                yield COLOURS[part], (share or 0.0) * steps_s, part
        yield "bad", training_s - steps_s, "between steps"
    else:
        yield "three", training_s, "train"
    for phase in PAUSES:
        if phase in record.phases:
            yield phase, record.phases[phase]["total_s"], phase


def metrics(runs: Mapping[str, Evidence]) -> Iterator[PagePicture]:
    """Draws each metric over steps, with its splits and the runs over each other. ``runs``: by the letter that is
    shown."""
    curves: dict[str, dict[str, tuple[Series, Series]]] = {}
    for letter, run in runs.items():
        for (split, name), curve in sorted(run.metrics.items(), key=lambda one: one[0][0] != "train"):
            if split != "throughput":
                curves.setdefault(name, {})[f"{letter} {split}".strip()] = curve
    drawn = [name for name, found in curves.items() if any(len(steps) > 1 for steps, _ in found.values())]
    yield from (_metric(name, curves[name]) for name in drawn[:MOST_METRICS])


def _metric(name: str, found: Mapping[str, tuple[Series, Series]]) -> PagePicture:
    curves, gone = [], []
    for place, (label, (steps, values)) in enumerate(found.items()):
        text = f"{label} {show_figure(float(values[-1]))}"
        curves.append(binned(steps, values, text, SERIES[place % len(SERIES)]))
        bad = steps[~np.isfinite(values)]
        if len(bad):
            gone.append(f"{label} is not finite in {len(bad)} of {len(values)} rows, first at step {bad[0]:.0f}")
    every_step, every_value = (np.concatenate(columns) for columns in zip(*found.values(), strict=True))
    low, high = limits(every_value)
    told = f"{name} over steps; latest: {', '.join(curve.name for curve in curves)}."
    chart = Chart("", Axis(*limits(every_step, 0.0), "step"), curves, high, low, told, height=140)
    return PagePicture(name, [chart], caption="; ".join(gone))


def own_pictures(record: RunRecord, folder: Path) -> Iterator[PagePicture]:
    """Yields the first PNG files of the evaluation, unchanged; a missing file or another format is left out."""
    pngs = {
        name: (folder / path).resolve() for name, path in own_files(record).items() if path.lower().endswith(".png")
    }
    there = [one for one in pngs.items() if one[1].is_relative_to(folder.resolve()) and one[1].is_file()]
    for name, file in [one for one in there if one[1].stat().st_size <= MOST_BYTES][:MOST_PICTURES]:
        content = file.read_bytes()
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            source = base64.b64encode(content).decode()
            yield PagePicture(name, image=Markup('<img alt="{}" src="data:image/png;base64,{}">').format(name, source))
