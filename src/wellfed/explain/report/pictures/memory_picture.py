"""Draws memory against what was planned for it: over time where it was watched, else its peak."""

from __future__ import annotations

from collections.abc import Iterator

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import Bar, Colour, LevelLine, PagePicture, Stroke, bars
from wellfed.explain.report.pictures.machine_pictures import over_gpus
from wellfed.explain.report.pictures.picture_parts import of_gpus, of_host
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.record import MemoryEntry
from wellfed.units import show_gib


def memory(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the device's memory if a GPU was used, else the process's."""
    levels = _levels(evidence.record.memory)
    curves, is_host = of_gpus(evidence, "mem_used_gib"), False
    if not curves and not evidence.on_gpu:
        curves, is_host = of_host(evidence, "rss_gib"), True
        levels = [] if curves else levels
    if not curves:
        if levels:
            yield _peak(levels)
        return
    highest = max(float(values.max()) for _, values in curves.values())
    drawn = over_gpus(curves, "this process and its workers" if is_host else "in use on the device")
    told = "".join(f" {level.name.replace(',', '')}." for level in levels)
    top = 1.05 * max([highest, *(level.y for level in levels)]) or 1.0
    told = f"{'Host' if is_host else 'Device'} memory over time, at most {show_gib(highest)}.{told}"
    chart = axis.chart("GiB", drawn, top, told, levels=levels, height=110)
    caption = "Resident memory." if is_host else "What is in use is of all processes on the device."
    yield PagePicture("Memory", [chart], caption=caption)


def _levels(memory: MemoryEntry) -> list[LevelLine]:
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


def _peak(levels: list[LevelLine]) -> PagePicture:
    """Draws the sizes as bars."""
    told = "Memory: " + "; ".join(level.name.replace(",", "") for level in levels)
    rows = [Bar(level.name, [(level.colour, level.y, level.name)]) for level in levels]
    return PagePicture("Memory", image=bars(rows, told))
