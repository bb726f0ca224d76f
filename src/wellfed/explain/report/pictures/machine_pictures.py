"""Draws what the machine did: utilisation and its swing, memory, CPUs, each GPU and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from wellfed.explain.diagnosis.curves.swing import LEAST_DEPTH
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.rules.rank_rules import ms_of, waits_for_others_ms
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import (
    SERIES,
    Bar,
    ChartCurve,
    Colour,
    Key,
    LevelLine,
    PagePicture,
    Stroke,
    bars,
)
from wellfed.explain.report.pictures.picture_parts import TimeAxis, binned, of_gpus, of_host, of_many
from wellfed.explain.report.pictures.step_time_picture import PARTS
from wellfed.explain.report.run_lines import MOST_GPUS
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import MemoryEntry, RankEntry
from wellfed.units import show_duration, show_gib, show_ms, show_percent

_HEIGHT, _LEAST_HEIGHT = 130, 44
"""Pixels of one curve, and of each of many."""


def utilisation(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the curve of each GPU, with phases and swing; without a GPU the cores at work."""
    what, curves = "utilisation", of_gpus(evidence, "util_pct")
    if not curves:  # as of a MIG instance
        what, curves = "SMs at work", of_gpus(evidence, "sm_active_pct")
    if not curves:
        yield from cpus(evidence, axis)
        return
    num_gpus = len(curves)
    kept = sorted(curves, key=lambda gpu: float(curves[gpu][1].mean()))[:MOST_GPUS]
    curves = {gpu: curve for gpu, curve in curves.items() if gpu in kept}
    swings = {gpu: one for gpu, one in evidence.swings.of_gpus.items() if gpu in curves and one.depth >= LEAST_DEPTH}
    deepest = max(swings, key=lambda gpu: swings[gpu].depth, default=None)
    height = max(_LEAST_HEIGHT, _HEIGHT // len(curves))
    charts = []
    for gpu, (at_s, values) in curves.items():
        who = f"GPU {gpu}"
        told = f"{who}: mean {values.mean():.3g} %, from {values.min():.3g} to {values.max():.3g}"
        levels = []
        if gpu == deepest:
            swing = swings[gpu]
            levels = [
                LevelLine(name, level, "bad", "dashed", f"{level:.0f} %")
                for name, level in (("levels of its swing", swing.low), ("", swing.high))
            ]
            told += f"; it swings between {swing.low:.0f} and {swing.high:.0f} %, every {show_duration(swing.period_s)}"
        curve = binned(at_s, values, what, "accent")
        about = f"{what[0].upper()}{what[1:]} over time. {told}."
        shown = {"title": who * (len(curves) > 1), "is_labelled": gpu == list(curves)[-1], "height": height}
        charts.append(axis.chart("%", [curve], 100.0, about, levels=levels, **shown))
    caption = of_many(max(len(at_s) for at_s, _ in curves.values()), "reading")
    if num_gpus > len(curves):
        caption = f"The {len(curves)} of {num_gpus:,} GPUs that were idle most. {caption}".rstrip()
    swings_text = evidence.swings.describe_utilisation() if deepest is not None else None
    yield PagePicture("Utilisation", charts, caption=" ".join(filter(None, [caption, swings_text])))


_HOST_LOADS: Mapping[str, tuple[str, Colour]] = {
    "cpu_pct": ("this run", "accent"),
    "loader_cpu_pct": ("its workers", "two"),
    "others_cpu_pct": ("other programs", "bad"),
    "iowait_pct": ("waiting for a disk", "checkpoint"),
}
"""Figures of the host in percent of a core, with their names and colours."""
_RANK_PARTS: Mapping[str, Colour] = {**PARTS, "others": "bad"}
"""Parts of a rank's step with their colours, as in the pictures of steps."""


def cpus(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the cores that this run and others took, and those that waited for a disk."""
    curves = []
    for column, (name, colour) in _HOST_LOADS.items():
        if found := of_host(evidence, column).get(HOST):
            at_s, busy_pct = found
            if column == "cpu_pct" or busy_pct.max() > 1:
                curves.append(binned(at_s, busy_pct / 100, name, colour))
    if not curves:
        return
    cores = evidence.cores
    highest = max(float(np.nanmax(curve.y if curve.high is None else curve.high)) for curve in curves)
    told = (f"{curve.name} {np.nanmean(curve.y):.2f}" for curve in curves)
    levels = [LevelLine("cores of this run", cores, "ink", "dotted")] if cores else []
    about = f"Cores at work over time, on average: {', '.join(told)}."
    chart = axis.chart("cores", curves, max(cores or 1.0, 1.05 * highest), about, levels=levels, height=110)
    yield PagePicture("CPU", [chart])


def over_gpus(found: Mapping[int, tuple[Series, Series]], name: str) -> list[ChartCurve]:
    """Returns a curve for each of a few GPUs, or mean and range over many."""
    if len(found) <= len(SERIES):
        names = [name] if len(found) == 1 else [f"GPU {gpu}" for gpu in found]
        colours: Sequence[Colour] = ["accent"] if len(found) == 1 else SERIES
        curves = zip(found.values(), names, colours, strict=False)
        return [binned(*curve, own, colour) for curve, own, colour in curves]
    x = max((at_s for at_s, _ in found.values()), key=len)
    every = np.array([np.interp(x, *curve) for curve in found.values()])
    mean, low, high = (binned(x, edge) for edge in (every.mean(axis=0), every.min(axis=0), every.max(axis=0)))
    least, most = low.y if low.low is None else low.low, high.y if high.high is None else high.high
    return [ChartCurve(f"{name}, mean and range of {len(found)} GPUs", "accent", mean.x, mean.y, least, most)]


def ranks_side_by_side(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws the mean step of each rank in its parts, those of many that waited longest for data."""
    ranks = evidence.record.ranks
    if len(ranks) < 2:
        return
    shown = sorted(ranks, key=lambda one: -one["wait_frac"])[:MOST_GPUS] if len(ranks) > MOST_GPUS else ranks
    has_nodes = len({one["node"] for one in ranks}) > 1
    waits_ms = waits_for_others_ms(evidence)
    rows = [_rank_bar(one, waits_ms.get(one["rank"], 0.0), has_nodes=has_nodes) for one in shown]
    caption = "Parts of the mean step, batches that were ready, peak of memory."
    caption += " Others: waiting for other ranks." if waits_ms else " Compute includes waiting for other ranks."
    if len(shown) < len(ranks):
        caption = f"The {len(shown)} of {len(ranks):,} ranks that waited longest; run.json has all. {caption}"
    waits = [one["wait_frac"] for one in ranks]
    told = f"Mean step of {len(ranks)} ranks: they wait {show_percent(min(waits))} to {show_percent(max(waits))} of it."
    used = dict.fromkeys(part[2].split(" ")[0] for row in rows for part in row.parts)
    keys = [Key(_RANK_PARTS[name], name, "area") for name in used]
    yield PagePicture("Ranks side by side", image=bars(rows, told), caption=caption, more_keys=keys)


def _rank_bar(one: RankEntry, waits_ms: float, *, has_nodes: bool) -> Bar:
    where = f", node {one['node']}" if has_nodes else ""
    where = where if one["gpu"] is None else f", GPU {one['gpu']}"
    spent = {name: ms_of(one, name) for name in _RANK_PARTS}
    spent |= {"compute": max(0.0, spent["compute"] - waits_ms), "others": waits_ms}
    parts = [(_RANK_PARTS[name], ms, f"{name} {show_ms(ms)}") for name, ms in spent.items() if ms]
    memory = "" if one["peak_gib"] is None else f", {show_gib(one['peak_gib'])}"
    text = f"{show_ms(one['step_ms_mean'])}, ready {100 * one['readiness_frac']:.0f} %{memory}"
    return Bar(f"rank {one['rank']}{where}", parts, text)


def memory(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the device's memory if a GPU was used, else the process's."""
    levels = _memory_levels(evidence.record.memory)
    curves, is_host = of_gpus(evidence, "mem_used_gib"), False
    if not curves and not evidence.on_gpu:
        curves, is_host, levels = of_host(evidence, "rss_gib"), True, []
    if not curves:
        return
    highest = max(float(values.max()) for _, values in curves.values())
    drawn = over_gpus(curves, "this process and its workers" if is_host else "in use on the device")
    told = "".join(f" {level.name.replace(',', '')}." for level in levels)
    top = 1.05 * max([highest, *(level.y for level in levels)]) or 1.0
    told = f"{'Host' if is_host else 'Device'} memory over time, at most {show_gib(highest)}.{told}"
    chart = axis.chart("GiB", drawn, top, told, levels=levels, height=110)
    caption = "Resident memory." if is_host else "What is in use is of all processes on the device."
    yield PagePicture("Memory", [chart], caption=caption)


def _memory_levels(memory: MemoryEntry) -> list[LevelLine]:
    found: dict[str, tuple[float | None, Colour, Stroke]] = {
        "budget": (memory.get("budget_gib"), "bad", "line"),
        "predicted peak": (memory.get("predicted_peak_gib"), "ink", "dashed"),
        "measured peak": (memory.get("measured_peak_gib"), "accent", "dotted"),
    }
    return [
        LevelLine(f"{name}, {show_gib(size_gib)}", size_gib, colour, stroke)
        for name, (size_gib, colour, stroke) in found.items()
        if size_gib is not None
    ]
