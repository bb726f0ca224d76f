"""Draws the time of a run from its start to its end as one bar."""

from __future__ import annotations

from collections.abc import Iterator

from wellfed.explain.diagnosis.compute_phases import phase_shares
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import Bar, Colour, Key, PagePicture, bars
from wellfed.explain.report.pictures.step_time_picture import PARTS, colour_of
from wellfed.explain.report.pictures.time_axis import PAUSES
from wellfed.units import show_duration, show_percent

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
