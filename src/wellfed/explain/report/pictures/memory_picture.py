"""Draws memory against what was planned for it: over time where it was watched, else its peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.picture import ACCENT, BAD, INK, SERIES, picture
from wellfed.explain.report.pictures.picture_parts import (
    WIDTH,
    Key,
    PagePicture,
    binned,
    curve,
    of_gpus,
    of_host,
    scale,
    the_most,
)
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.observe.telemetry.machines import named
from wellfed.record import MemoryEntry
from wellfed.units import show_gib

_MOST_COLOURS = 4
"""More GPUs have one colour."""
_Line = tuple[float, str, Literal["line", "dashed", "dotted"]]
"""GiB, colour, kind."""


def memory(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the device's memory if a GPU was used, else the process's."""
    lines = _lines(evidence.record.memory)
    curves, is_host = of_gpus(evidence, "mem_used_gib"), False
    if not curves and not evidence.on_gpu:
        curves, is_host, lines = of_host(evidence, "rss_gib"), True, {}
    if not curves:
        lines = _lines(evidence.record.memory)
        if lines:
            yield _peak(lines)
        return
    num_gpus = len(curves)
    curves = the_most(curves, lambda values: float(values.max()))
    highest = max(float(values.max()) for _, values in curves.values())
    keys = [Key(colour, f"{name}, {show_gib(size)}", kind) for name, (size, colour, kind) in lines.items()]
    with picture(WIDTH, 2.4) as drawn:
        axes = drawn.figure.add_subplot()
        axis.shade(axes)
        has_colours = 1 < len(curves) <= _MOST_COLOURS
        for place, (gpu, (at_s, values)) in enumerate(curves.items()):
            curve(axes, binned(axis.scaled(at_s), values), SERIES[place] if has_colours else ACCENT)
            if has_colours:
                keys.append(Key(SERIES[place], f"GPU {named(gpu)}"))
        if not has_colours:
            who = "this process and its workers" if is_host else f"in use on the device{'s' * (len(curves) > 1)}"
            keys.insert(0, Key(ACCENT, who))
        for size_gib, colour, kind in lines.values():
            axes.axhline(size_gib, color=colour, linestyle="-" if kind == "line" else kind, linewidth=1.1)
        scale(axes, max([highest, *(size_gib for size_gib, _, _ in lines.values())]), "GiB")
        axis.put_under(axes)
        told = "".join(f" {name} {show_gib(size_gib)}." for name, (size_gib, _, _) in lines.items())
        drawn.told = f"{'Host' if is_host else 'Device'} memory over time, at most {show_gib(highest)}.{told}"
    caption = "Resident memory." if is_host else "What is in use is of all processes on the device."
    if num_gpus > len(curves):
        caption = f"The {len(curves)} of {num_gpus:,} GPUs that held the most. {caption}"
    yield PagePicture(drawn.svg, [*keys, *axis.keys], caption)


def _lines(memory: MemoryEntry) -> Mapping[str, _Line]:
    found: dict[str, tuple[float | None, str, Literal["line", "dashed", "dotted"]]] = {
        "budget": (memory.get("budget_gib"), BAD, "line"),
        "predicted peak": (memory.get("predicted_peak_gib"), INK, "dashed"),
        "measured peak": (memory.get("measured_peak_gib"), ACCENT, "dotted"),
    }
    return {name: (size_gib, colour, kind) for name, (size_gib, colour, kind) in found.items() if size_gib is not None}


def _peak(lines: Mapping[str, _Line]) -> PagePicture:
    """Draws the sizes as bars."""
    sizes = {name: size_gib for name, (size_gib, _, _) in lines.items()}
    with picture(WIDTH, 0.6 + 0.35 * len(sizes)) as drawn:
        axes = drawn.figure.add_subplot()
        axes.barh(list(sizes), list(sizes.values()), color=ACCENT, alpha=0.8, height=0.6)
        for place, size_gib in enumerate(sizes.values()):
            axes.text(size_gib, place, f" {show_gib(size_gib)}", va="center")
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        drawn.told = "Memory: " + "; ".join(f"{name} {show_gib(size_gib)}" for name, size_gib in sizes.items())
    return PagePicture(drawn.svg)
