"""Draws what the machine did: its CPUs, each GPU beside the others, power, temperature and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.ranks.rank_comparison import ms_of, waits_for_others_ms
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import SERIES, Bar, ChartCurve, Colour, Key, LevelLine, PagePicture, Stretch, bars
from wellfed.explain.report.pictures.picture_parts import binned, of_gpus, of_host
from wellfed.explain.report.pictures.step_time_picture import PARTS
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.explain.report.run_lines import MOST_GPUS, figure_of
from wellfed.observe.telemetry.machines import HOST, named
from wellfed.record import RankEntry
from wellfed.units import show_gib, show_ms, show_percent

_HOST_LOADS: Mapping[str, tuple[str, Colour]] = {
    "cpu_pct": ("this run", "accent"),
    "loader_cpu_pct": ("its workers", "two"),
    "others_cpu_pct": ("other programs", "bad"),
    "iowait_pct": ("waiting for a disk", "checkpoint"),
}
"""Figures of the host in percent of a core, with their names and colours."""
_CARD = {"power_w": ("Power", "W"), "temp_c": ("Temperature", "°C"), "sm_clock_mhz": ("Clock", "MHz")}
_RANK_PARTS: Mapping[str, Colour] = {**PARTS, "others": "bad"}
"""Parts of a rank's step with their colours, as in the pictures of steps."""
_LIMITS: Mapping[str, Colour] = {"power_limited": "one", "heat_limited": "bad"}
"""Flags of readings in which the clock was held down."""


def cpus(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the cores that this run and others took, and those that waited for a disk."""
    curves = []
    for column, (name, colour) in _HOST_LOADS.items():
        if found := of_host(evidence, column).get(HOST):
            at_s, busy_pct = found
            if column == "cpu_pct" or busy_pct.max() > 1:
                curves.append(binned(at_s, busy_pct / 100).curve(name, colour))
    if not curves:
        return
    cores = evidence.cores
    highest = max(float(np.nanmax(curve.y if curve.high is None else curve.high)) for curve in curves)
    told = (f"{curve.name} {np.nanmean(curve.y):.2f}" for curve in curves)
    levels = [LevelLine("cores of this run", cores, "ink", "dotted")] if cores else []
    about = f"Cores at work over time, on average: {', '.join(told)}."
    chart = axis.chart("cores", curves, max(cores or 1.0, 1.05 * highest), about, levels=levels, height=110)
    yield PagePicture("CPU", [chart])


def card(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws power, temperature and clock of the GPUs, and when limits held the clock down."""
    for column, (title, unit) in _CARD.items():
        found = of_gpus(evidence, column)
        curves = over_gpus(found, title.lower())
        highest = max((float(values.max()) for _, values in found.values()), default=0.0)
        if not curves or highest <= 0:
            continue
        spans, held = list(axis.strip), []
        if column == "sm_clock_mhz":
            held = [(flag, colour, _stretches(evidence, flag)) for flag, colour in _LIMITS.items()]
            spans = [Stretch(*edges, colour) for _, colour, stretches in held for edges in stretches] or spans
        caption = "; ".join(f"{flag.replace('_', ' ')} below" for flag, _, stretches in held if stretches)
        told = f"{title} of the GPUs over time, at most {highest:.0f} {unit}."
        chart = axis.chart(unit, curves, 1.05 * highest, told, spans=spans, height=80)
        yield PagePicture(title, [chart], caption=f"Strip: {caption}." if caption else "")


def _stretches(evidence: Evidence, flag: str) -> list[tuple[float, float]]:
    """Returns when a limit held the clock of any GPU down; a reading covers the time since the one before."""
    found = []
    for at_s, values in of_gpus(evidence, flag).values():
        began_s = np.concatenate([at_s[:1], at_s[:-1]])
        found += [(a, b) for a, b in zip(began_s[values > 0].tolist(), at_s[values > 0].tolist(), strict=True)]
    joined: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(found):
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((begin_s, end_s))
    return joined


def over_gpus(found: Mapping[int, tuple[Series, Series]], name: str) -> list[ChartCurve]:
    """Returns a curve for each of a few GPUs, or mean and range over many."""
    if len(found) == 1:
        return [binned(*curve).curve(name, "accent") for curve in found.values()]
    if len(found) <= len(SERIES):
        return [
            binned(*curve).curve(f"GPU {named(gpu)}", colour)
            for (gpu, curve), colour in zip(found.items(), SERIES, strict=False)
        ]
    x = max((at_s for at_s, _ in found.values()), key=len)
    every = np.array([np.interp(x, *curve) for curve in found.values()])
    mean, low, high = (binned(x, edge) for edge in (every.mean(axis=0), every.min(axis=0), every.max(axis=0)))
    return [ChartCurve(f"{name}, mean and range of {len(found)} GPUs", "accent", mean.x, mean.mean, low.low, high.high)]


def side_by_side(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws the mean utilisation of each GPU as bars, the idlest of many first."""
    rows = []
    for gpu, figures in evidence.record.gpus.items():
        if util := figure_of(figures, "util_pct", "mean", "p5", "p95"):
            text = [f"{util['mean']:.0f} %"]
            if memory := figure_of(figures, "mem_used_gib", "max"):
                text.append(f"{memory['max']:.1f} GiB")
            if power := figure_of(figures, "power_w", "mean"):
                text.append(f"{power['mean']:.0f} W")
            rows.append((util["mean"], Bar(f"GPU {gpu}", [("accent", util["mean"], "utilisation")], ", ".join(text))))
    if len(rows) < 2:
        return
    shown = sorted(rows, key=lambda row: row[0])[:MOST_GPUS] if len(rows) > MOST_GPUS else rows
    caption = f"The {len(shown)} idlest of {len(rows):,} GPUs." if len(shown) < len(rows) else ""
    means = [mean for mean, _ in rows]
    told = f"Mean utilisation of {len(rows)} GPUs, from {min(means):.0f} to {max(means):.0f} %."
    yield PagePicture("GPUs side by side", image=bars([bar for _, bar in shown], told, 100.0), caption=caption)


def ranks_side_by_side(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws the mean step of each rank in its parts, those of many that waited longest for data."""
    ranks = evidence.record.ranks
    if len(ranks) < 2:
        return
    shown = sorted(ranks, key=lambda one: -one["wait_frac"])[:MOST_GPUS] if len(ranks) > MOST_GPUS else ranks
    has_nodes = len({one["node"] for one in ranks}) > 1
    waits_ms = waits_for_others_ms(evidence)
    rows = [
        Bar(_rank_name(one, has_nodes=has_nodes), _rank_parts(one, waits_ms.get(one["rank"], 0.0)), _rank_text(one))
        for one in shown
    ]
    caption = "Parts of the mean step, batches that were ready, peak of memory."
    caption += " Others: waiting for other ranks." if waits_ms else " Compute includes waiting for other ranks."
    if len(shown) < len(ranks):
        caption = f"The {len(shown)} of {len(ranks):,} ranks that waited longest; run.json has all. {caption}"
    waits = [one["wait_frac"] for one in ranks]
    told = f"Mean step of {len(ranks)} ranks: they wait {show_percent(min(waits))} to {show_percent(max(waits))} of it."
    used = dict.fromkeys(part[2].split(" ")[0] for row in rows for part in row.parts)
    keys = [Key(_RANK_PARTS[name], name, "area") for name in used]
    yield PagePicture("Ranks side by side", image=bars(rows, told), caption=caption, more_keys=keys)


def _rank_name(one: RankEntry, *, has_nodes: bool) -> str:
    parts = [f"rank {one['rank']}", *([f"GPU {one['gpu']}"] if one["gpu"] is not None else [])]
    return ", ".join([*parts, f"node {one['node']}"] if has_nodes and one["gpu"] is None else parts)


def _rank_parts(one: RankEntry, waits_ms: float) -> list[tuple[Colour, float, str]]:
    spent = {name: ms_of(one, name) for name in _RANK_PARTS}
    spent |= {"compute": max(0.0, spent["compute"] - waits_ms), "others": waits_ms}
    return [(_RANK_PARTS[name], ms, f"{name} {show_ms(ms)}") for name, ms in spent.items() if ms]


def _rank_text(one: RankEntry) -> str:
    memory = "" if one["peak_gib"] is None else f", {show_gib(one['peak_gib'])}"
    return f"{show_ms(one['step_ms_mean'])}, ready {100 * one['readiness_frac']:.0f} %{memory}"
