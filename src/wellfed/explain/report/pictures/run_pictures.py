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
from wellfed.explain.pages.chart import Axis, Bar, Chart, Colour, Key, PagePicture, bars, limits
from wellfed.explain.report.pictures.machine_pictures import (
    cpus,
    memory,
    ranks_side_by_side,
    utilisation,
)
from wellfed.explain.report.pictures.picture_parts import PAUSES, TimeAxis, binned
from wellfed.explain.report.pictures.step_time_picture import PARTS, colour_of, histogram, step_time
from wellfed.explain.report.run_lines import own_files, show_figure
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import RunRecord
from wellfed.units import MIB, show_duration, show_percent

MOST_PICTURES, MOST_BYTES = 8, MIB
"""Most pictures in a page, and bytes of each; others are named only."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pictures(evidence: Evidence, folder: Path) -> Mapping[str, Any]:
    """Returns the pictures of a run by their section, and ``axis``, the time axis of the linked ones.

    Pictures of ``beside_`` a section stand with its lines.
    """
    axis = TimeAxis.of(evidence)
    has_gpus = not evidence.record.is_on_cpu and not evidence.watched.keys() <= {HOST}
    host = list(cpus(evidence, axis)) if has_gpus else []
    return {
        "axis": axis,
        "life": list(life(evidence)),
        "utilisation": [*utilisation(evidence, axis), *host],
        "time": [*step_time(evidence, axis), *ranks_side_by_side(evidence)],
        "beside_time": list(histogram(evidence)),
        "memory": list(memory(evidence, axis)),
        "metrics": list(metrics(evidence, axis)),
        "files": list(own_pictures(evidence.record, folder)),
    }


def own_pictures(record: RunRecord, folder: Path) -> Iterator[PagePicture]:
    """Yields the first PNG files of the evaluation, unchanged; a missing file or another format is left out."""
    found = 0
    for name, path in own_files(record).items():
        content = _content(folder, path) if found < MOST_PICTURES and path.lower().endswith(".png") else None
        if content is not None:
            found += 1
            source = base64.b64encode(content).decode()
            yield PagePicture(name, image=Markup('<img alt="{}" src="data:image/png;base64,{}">').format(name, source))


def _content(folder: Path, path: str) -> bytes | None:
    try:
        file = (folder / path).resolve()
        if not file.is_relative_to(folder.resolve()) or file.stat().st_size > MOST_BYTES:
            return None
        content = file.read_bytes()
    except OSError:
        return None
    return content if content.startswith(_SIGNATURE) else None


_LEAST_FRAC = 0.002
"""Share of the time below which a part is left out."""


def life(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws start, parts of the steps, time between steps, and other phases; nothing of a run without a time."""
    spent = [one for one in _parts(evidence) if one[1] > 0]
    known_s = sum(seconds for _, seconds, _ in spent)
    total_s = max(evidence.record.duration_s, known_s)
    if not spent or total_s <= 0:
        return
    spent.append(("ink", total_s - known_s, "other"))
    shown = [(colour, seconds, name) for colour, seconds, name in spent if seconds >= _LEAST_FRAC * total_s]
    texts = [f"{name} {show_duration(seconds)}, {show_percent(seconds / total_s)}" for _, seconds, name in shown]
    parts = [(colour, seconds, text) for (colour, seconds, _), text in zip(shown, texts, strict=True)]
    image = bars([Bar("", parts)], f"Time of the run: {'; '.join(texts)}.", total_s)
    keys = [Key(colour, text, "area") for colour, _, text in parts]
    yield PagePicture(f"Where {show_duration(total_s)} went", image=image, more_keys=keys)


def _parts(evidence: Evidence) -> Iterator[tuple[Colour, float, str]]:
    record, time, wall = evidence.record, evidence.record.time, evidence.wall.entry
    yield "soft", sum(seconds for seconds in record.before_training.values() if isinstance(seconds, float)), "start"
    training_s = record.phases["train"]["total_s"] if "train" in record.phases else 0.0
    steps_s = training_s if wall is None else min(training_s, wall["steps_s"])
    if time:
        for name in PARTS:
            phases = phase_shares(evidence.record.time) if name == "compute" else {}
            for part, share in (phases or {name: time[f"{name}_frac"]}).items():  # type: ignore[literal-required]
                yield colour_of(part), (share or 0.0) * steps_s, part
        yield "bad", training_s - steps_s, "between steps"
    else:
        yield "three", training_s, "train"
    for phase in PAUSES:
        if phase in record.phases:
            yield phase, record.phases[phase]["total_s"], phase


MOST_METRICS = 9
"""Most metrics with a picture; all are in the table."""
_COLOURS: tuple[Colour, ...] = ("three", "one", "two", "four")


def metrics(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws a picture of each metric, with its splits: over time if steps.csv has it, else over steps."""
    table = evidence.all_steps
    step, at_s = (table.get(name, np.empty(0)) for name in ("step", "time_s"))
    has_times = len(step) > 1 and len(step) == len(at_s) and bool(np.all(np.isfinite(step) & np.isfinite(at_s)))
    times = (step, at_s) if has_times else None
    by_name: dict[str, dict[str, tuple[Series, Series]]] = {}
    for (split, name), found in evidence.metrics.items():
        if split != "throughput":
            by_name.setdefault(name, {})[split] = found
    drawn_ones = [
        (name, splits) for name, splits in by_name.items() if any(len(steps) > 1 for steps, _ in splits.values())
    ]
    for name, splits in drawn_ones[:MOST_METRICS]:
        yield _metric(name, splits, axis, times)


def _metric(
    name: str, splits: Mapping[str, tuple[Series, Series]], time_axis: TimeAxis, times: tuple[Series, Series] | None
) -> PagePicture:
    """Draws a metric; ``times``: steps and their ends on the time axis, None = the axis is steps."""
    curves, gone = [], []
    for place, (split, (steps, values)) in enumerate(sorted(splits.items(), key=lambda one: one[0] != "train")):
        x = steps if times is None else np.interp(steps, *times)
        curves.append(binned(x, values, f"{split} {show_figure(float(values[-1]))}", _COLOURS[place % 4]))
        missing = int((~np.isfinite(values)).sum())
        if missing:
            first = steps[~np.isfinite(values)][0]
            gone.append(f"{split} is not finite in {missing} of {len(values)} rows, first at step {first:.0f}")
    told = f"{name} over steps; latest: {', '.join(curve.name for curve in curves)}."
    steps, values = (np.concatenate(found) for found in zip(*splits.values(), strict=True))
    low, high = limits(values)
    axis = Axis(*limits(steps, 0.0), "step") if times is None else time_axis.axis
    spans = [] if times is None else time_axis.strip
    if times is not None:
        curves.append(binned(times[1], times[0], "step", kind="told"))
    chart = Chart(*("", axis, curves, high, low, told), spans=spans, height=140, is_linked=times is not None)
    return PagePicture(name, [chart], caption="; ".join(gone))
