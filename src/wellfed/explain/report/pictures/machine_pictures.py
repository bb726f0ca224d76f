"""Draws what the machine did: utilisation, memory, CPUs, each GPU and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.rules.rank_rules import ms_of, waits_for_others_ms
from wellfed.explain.pages.chart import SERIES, Bar, Colour, Key, LevelLine, PagePicture, Stroke, bars
from wellfed.explain.report.pictures.picture_parts import TimeAxis, binned, of_gpus, readings
from wellfed.explain.report.pictures.step_time_picture import COLOURS
from wellfed.explain.report.run_lines import MOST_GPUS
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import RankEntry
from wellfed.units import show_gib, show_ms, show_percent

_HEIGHT, _LEAST_HEIGHT = 130, 44
"""Pixels of one curve, and of each of many."""
_OF_HOST: Mapping[str, tuple[str, Colour]] = {
    "cpu_pct": ("this run", "accent"),
    "loader_cpu_pct": ("its workers", "two"),
    "others_cpu_pct": ("other programs", "bad"),
    "iowait_pct": ("waiting for a disk", "checkpoint"),
}
"""Figures of the host in percent of a core, with their names and colours."""
_OF_RANK: Mapping[str, Colour] = {**COLOURS, "others": "bad"}
"""Parts of a rank's step with their colours, as in the pictures of steps."""
_LEVELS: Mapping[str, tuple[str, Colour, Stroke]] = {
    "budget_gib": ("budget", "bad", "line"),
    "predicted_peak_gib": ("predicted peak", "ink", "dashed"),
    "measured_peak_gib": ("measured peak", "accent", "dotted"),
}
"""Entries of the record's memory, with their names and lines."""


def utilisation(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the curve of each GPU, of many those that were idle most."""
    what, curves = "utilisation", of_gpus(evidence, "util_pct")
    if not curves:  # as of a MIG instance
        what, curves = "SMs at work", of_gpus(evidence, "sm_active_pct")
    if not curves:
        return
    shown = sorted(sorted(curves, key=lambda gpu: float(curves[gpu][1].mean()))[:MOST_GPUS])
    height, charts = max(_LEAST_HEIGHT, _HEIGHT // len(shown)), []
    for gpu in shown:
        at_s, values = curves[gpu]
        spread = f"mean {values.mean():.3g} %, from {values.min():.3g} to {values.max():.3g}"
        told = f"{what[0].upper()}{what[1:]} over time. GPU {gpu}: {spread}."
        title = f"GPU {gpu}" if len(shown) > 1 else ""
        curve = binned(at_s, values, what, "accent")
        charts.append(axis.chart("%", [curve], 100.0, told, title=title, is_labelled=gpu == shown[-1], height=height))
    many = f"The {len(shown)} of {len(curves):,} GPUs that were idle most." if len(shown) < len(curves) else ""
    caption = f"{many} {evidence.swings.describe_utilisation() or ''}".strip()
    yield PagePicture("Utilisation", charts, caption=caption)


def cpus(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the cores that this run and others took, and those that waited for a disk."""
    curves = []
    for column, (name, colour) in _OF_HOST.items():
        if found := readings(evidence.watched, column, [HOST]).get(HOST):
            at_s, busy_pct = found
            if column == "cpu_pct" or busy_pct.max() > 1:
                curves.append(binned(at_s, busy_pct / 100, name, colour))
    if not curves:
        return
    cores = evidence.cores
    highest = max(float((curve.y if curve.high is None else curve.high).max()) for curve in curves)
    levels = [LevelLine("cores of this run", cores, "ink", "dotted")] if cores else []
    told = f"Cores at work over time, on average: {', '.join(f'{one.name} {one.y.mean():.2f}' for one in curves)}."
    chart = axis.chart("cores", curves, max(cores or 1.0, 1.05 * highest), told, levels=levels, height=110)
    yield PagePicture("CPU", [chart])


def memory(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the device's memory if a GPU was used, of many those that were fullest; else the process's."""
    curves, name, caption = of_gpus(evidence, "mem_used_gib"), "in use on the device", "Of all processes on the device."
    sizes = {key: size for key in _LEVELS if isinstance(size := evidence.record.memory.get(key), int | float)}
    if not curves and not evidence.on_gpu:
        curves, name, caption = readings(evidence.watched, "rss_gib", [HOST]), "this process and its workers", ""
        sizes = {}
    if not curves:
        return
    fullest = sorted(sorted(curves, key=lambda gpu: -float(curves[gpu][1].max()))[: len(SERIES)])
    names = {gpu: name if len(curves) == 1 else f"GPU {gpu}" for gpu in fullest}
    drawn = [binned(*curves[gpu], names[gpu], colour) for gpu, colour in zip(fullest, SERIES, strict=False)]
    levels = [
        LevelLine(f"{words}, {show_gib(sizes[key])}", sizes[key], colour, stroke)
        for key, (words, colour, stroke) in _LEVELS.items()
        if key in sizes
    ]
    highest = max(float(values.max()) for _, values in curves.values())
    told = f"Memory over time: {name}, at most {show_gib(highest)}. {'; '.join(one.name for one in levels)}"
    top = 1.05 * max([highest, *sizes.values()]) or 1.0
    many = f"The {len(drawn)} of {len(curves)} GPUs that were fullest. " if len(drawn) < len(curves) else ""
    chart = axis.chart("GiB", drawn, top, told, levels=levels, height=110)
    yield PagePicture("Memory", [chart], caption=many + caption)


def ranks_side_by_side(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws the mean step of each rank in its parts, those of many that waited longest for data."""
    ranks = evidence.record.ranks
    if len(ranks) < 2:
        return
    shown = sorted(ranks, key=lambda one: -one["wait_frac"])[:MOST_GPUS] if len(ranks) > MOST_GPUS else ranks
    waits_ms = waits_for_others_ms(evidence)
    rows = [_rank_bar(one, waits_ms.get(one["rank"], 0.0)) for one in shown]
    caption = "Parts of the mean step, batches that were ready, peak of memory."
    caption += " Others: waiting for other ranks." if waits_ms else " Compute includes waiting for other ranks."
    if len(shown) < len(ranks):
        caption = f"The {len(shown)} of {len(ranks):,} ranks that waited longest; run.json has all. {caption}"
    waits = [one["wait_frac"] for one in ranks]
    told = f"Mean step of {len(ranks)} ranks: they wait {show_percent(min(waits))} to {show_percent(max(waits))} of it."
    used = dict.fromkeys(part[2].split(" ")[0] for row in rows for part in row.parts)
    keys = [Key(_OF_RANK[name], name, "area") for name in used]
    yield PagePicture("Ranks side by side", image=bars(rows, told), caption=caption, more_keys=keys)


def _rank_bar(one: RankEntry, waits_ms: float) -> Bar:
    spent = {name: ms_of(one, name) for name in ("wait", "copy", "compute", "host")}
    spent |= {"compute": max(0.0, spent["compute"] - waits_ms), "others": waits_ms}
    parts = [(_OF_RANK[name], ms, f"{name} {show_ms(ms)}") for name, ms in spent.items() if ms]
    memory = "" if one["peak_gib"] is None else f", {show_gib(one['peak_gib'])}"
    text = f"{show_ms(one['step_ms_mean'])}, ready {100 * one['readiness_frac']:.0f} %{memory}"
    where = f"node {one['node']}" if one["gpu"] is None else f"GPU {one['gpu']}"
    return Bar(f"rank {one['rank']}, {where}", parts, text)
