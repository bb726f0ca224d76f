"""Draws what a run has left in its tables: utilisation, step time, memory and metrics over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.run_tables import HOST, Series
from wellfed.diagnosis.swing import LEAST_DEPTH, Swing
from wellfed.pages.picture import ACCENT, BAD, INK, SERIES, picture
from wellfed.report.curve_bins import Binned, binned
from wellfed.report.run_lines import EVERYDAY_EVENTS, show_figure
from wellfed.report.run_sections import Name
from wellfed.report.time_axis import TimeAxis
from wellfed.units import counted, show_duration, show_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_METRICS = 9
"""That get a picture; all are in the table."""
WIDTH = 5.7
"""Inches of 72 pixels: text is readable on a phone, and two of them stand side by side on a desk."""
_PARTS = ("wait", "copy", "compute", "host")
_RULED_FRAC = 1 / 16
"""Of a picture: a shorter period gets one of its own."""
_PERIODS = 6
"""That one shows."""
_MARKS = "v^sDoP"


@dataclass(frozen=True)
class Shown:
    """A picture and what stands beside it."""

    svg: Markup
    caption: str = ""
    title: str = ""


def pictures(evidence: Evidence) -> Mapping[Name, Sequence[Shown]]:
    """Those that there are figures for, by the section that they belong to."""
    axis = TimeAxis.of(evidence)
    of_sections: dict[Name, Callable[[Evidence, TimeAxis], Iterator[Shown]]] = {
        "utilisation": utilisation,
        "time": step_time,
        "memory": memory,
        "metrics": metrics,
    }
    return {name: list(draw(evidence, axis)) for name, draw in of_sections.items()}


def utilisation(evidence: Evidence, axis: TimeAxis) -> Iterator[Shown]:
    """The curve of each GPU, with the phases of the run and its swing; without a GPU that of the processor."""
    what, unit, curves, top = "utilisation", "%", _of_gpus(evidence, "util_pct"), 100.0
    if not curves:  # as of a MIG instance
        what, curves = "SMs at work", _of_gpus(evidence, "sm_active_pct")
    if not curves:
        what, unit, curves = "CPU of this process and its workers", "cores", _of_host(evidence, "cpu_pct")
        curves = {gpu: (at_s, busy_pct / 100) for gpu, (at_s, busy_pct) in curves.items()}
        top = max([evidence.cores or 1.0, *(float(values.max()) for _, values in curves.values())])
    if not curves:
        return
    swings = {gpu: one for gpu, one in evidence.swings_of_gpus.items() if gpu in curves and one.depth >= LEAST_DEPTH}
    deepest = max(swings, key=lambda gpu: swings[gpu].depth, default=None)
    is_short = deepest is not None and swings[deepest].period_s < _RULED_FRAC * axis.span_s
    height = max(0.62, 2.0 / len(curves))
    with picture(WIDTH, 0.85 + height * len(curves) + 1.75 * is_short) as drawn:
        rows = _rows(drawn.figure, [height] * len(curves) + [1.15] * is_short)
        told = []
        for axes, (gpu, (at_s, values)) in zip(rows, curves.items(), strict=False):
            axis.shade(axes)
            _curve(axes, binned(axis.scaled(at_s), values))
            _scale(axes, top, unit)
            axis.put_under(axes, is_labelled=axes is rows[len(curves) - 1])
            who = "CPU" if gpu == HOST else f"GPU {gpu}"
            if gpu != HOST and len(curves) > 1:
                axes.text(0.006, 0.98, who, transform=axes.transAxes, va="top", weight="bold")
            elif gpu == HOST and evidence.cores:
                axes.axhline(evidence.cores, color=INK, linewidth=1, linestyle=":", label="cores of this run")
            told.append(f"{who}: mean {values.mean():.3g} {unit}, from {values.min():.3g} to {values.max():.3g}")
            if gpu == deepest:
                _ruler(axes, axis.scaled, at_s, values, swings[gpu], is_period_shown=not is_short)
                told.append(f"it swings between {swings[gpu].low:.0f} and {swings[gpu].high:.0f} %, every "
                            f"{show_duration(swings[gpu].period_s)}")  # fmt: skip
        if is_short and deepest is not None:
            _periods(rows[-1], deepest, *_last(*curves[deepest], swings[deepest].period_s), swings[deepest])
            _scale(rows[-1], top, unit)
        _legend(drawn.figure, rows[0])
        drawn.told = f"{what.capitalize()} over time. {'; '.join(told)}."
    yield Shown(drawn.svg, f"{what[0].upper()}{what[1:]}{_thinned(max(len(at_s) for at_s, _ in curves.values()))}.")


def _of_gpus(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    """Times and readings of a figure, by GPU."""
    return {gpu: found for gpu in sorted(evidence.watched) if gpu != HOST for found in _readings(evidence, name, gpu)}


def _of_host(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    return {HOST: found for found in _readings(evidence, name, HOST)}


def _readings(evidence: Evidence, name: str, gpu: int) -> Iterator[tuple[Series, Series]]:
    """Once, or not at all."""
    curve = evidence.watched.get(gpu, {})
    if "time_s" in curve and name in curve:
        there = np.isfinite(curve["time_s"]) & np.isfinite(curve[name])
        if there.any():
            yield curve["time_s"][there], curve[name][there]


def _last(at_s: Series, values: Series, period_s: float) -> tuple[Series, Series]:
    """The last periods of a curve."""
    there = at_s >= at_s[-1] - _PERIODS * period_s
    return at_s[there], values[there]


def _ruler(
    axes: Axes, scaled: Callable[[Series], Series], at_s: Series, values: Series, swing: Swing, *, is_period_shown: bool
) -> None:
    """The levels of a swing, and its period over one that there was."""
    for level in (swing.low, swing.high):
        axes.axhline(level, color=BAD, linewidth=1, linestyle="--")
        axes.text(
            1.005, level, f"{level:.0f} %", transform=axes.get_yaxis_transform(), va="center", color=BAD, clip_on=False
        )
    if not is_period_shown:
        return
    middle = (swing.low + swing.high) / 2
    rises = at_s[1:][(values[1:] >= middle) & (values[:-1] < middle)]
    begin_s = float(rises[len(rises) // 2]) if len(rises) else float(at_s[0])
    begin_s = min(begin_s, float(at_s[-1]) - swing.period_s)
    begin, end = (float(scaled(np.array(edge_s))) for edge_s in (begin_s, begin_s + swing.period_s))
    height = swing.high + 9
    axes.annotate("", (begin, height), (end, height), arrowprops={"arrowstyle": "|-|,widthA=.3,widthB=.3", "color": BAD})
    axes.text((begin + end) / 2, height + 4, show_duration(swing.period_s), ha="center", va="bottom", color=BAD,
              weight="bold")  # fmt: skip


def _periods(axes: Axes, gpu: int, at_s: Series, values: Series, swing: Swing) -> None:
    """Single readings of a swing that is too short for the picture of the run."""
    axes.plot(at_s, values, color=ACCENT, linewidth=1.2)
    _ruler(axes, lambda edge_s: edge_s, at_s, values, swing, is_period_shown=True)
    axes.set_xlabel(f"its last {_PERIODS} periods{f' on GPU {gpu}' if gpu else ''}, seconds")


def step_time(evidence: Evidence, axis: TimeAxis) -> Iterator[Shown]:
    """The parts of a step upon each other, with the warm-up and what happened."""
    table = evidence.all_steps
    at_s, number = table.get("time_s", np.empty(0)), len(table.get("wait_ms", ()))
    if number == 0 or len(at_s) != number:
        return
    parts = {name: np.nan_to_num(table[f"{name}_ms"]) for name in _PARTS if np.isfinite(table[f"{name}_ms"]).any()}
    total_ms = np.sum(list(parts.values()), axis=0)
    total = binned(axis.scaled(at_s), total_ms)
    warmup = evidence.record.throughput["warmup_steps"] if evidence.record.throughput else 0
    most_ms = _most(total_ms[warmup:] if warmup < number else total_ms, total)
    swing = evidence.record.swing
    period = swing["period_steps"] if swing and swing["period_steps"] and 2 * swing["period_steps"] <= number else 0
    with picture(WIDTH, 2.85 + 1.75 * bool(period)) as drawn:
        rows = _rows(drawn.figure, [2.0, 1.15][: 1 + bool(period)])
        axes = rows[0]
        if warmup and number > 1:
            end_s = max(float(at_s[min(warmup, number) - 1]), float(at_s[0]) + axis.span_s / 250)
            axes.axvspan(*axis.scaled(np.array([axis.begin_s, end_s])), color=INK, alpha=0.15, lw=0, label="warm-up")
        _areas(axes, total.x, [binned(axis.scaled(at_s), ms).mean for ms in parts.values()], list(parts))
        if total.is_thinned:
            axes.plot(total.x, total.high, color=INK, linewidth=0.6, alpha=0.5, label="longest")
        axes.set_ylim(0, most_ms)
        axes.set_ylabel("ms a step")
        _happened(axes, evidence, axis, most_ms)
        axis.put_under(axes)
        if period and swing:
            _folded(rows[-1], table, parts, period, swing["period_s"])
        _legend(drawn.figure, axes)
        shares = ", ".join(f"{name} {ms.mean():.3g} ms" for name, ms in parts.items())
        drawn.told = f"Time of a step over {counted(number, 'step')}: {shares} on average."
    longest = int(total_ms.argmax())
    caption = f"Parts of a step{_thinned(number, 'step')}."
    if total_ms[longest] > most_ms:
        caption += f" The longest, step {table['step'][longest]:.0f}, took {show_duration(total_ms[longest] / 1e3)}."
    yield Shown(drawn.svg, caption)


def _most(total_ms: Series, curve: Binned) -> float:
    """Up to where step times are shown: a few very long steps must not flatten all others."""
    usual_ms = float(np.nanpercentile(curve.mean, 95)) if np.isfinite(curve.mean).any() else 1.0
    return max(1e-3, 1.08 * min(float(total_ms.max()), 2.5 * usual_ms))


def _areas(axes: Axes, x: Series, heights: Sequence[Series], names: Sequence[str], step: str | None = None) -> None:
    below = np.zeros(len(x))
    for height, name in zip(heights, names, strict=True):
        colour = SERIES[_PARTS.index(name)]
        axes.fill_between(x, below, below + height, color=colour, alpha=0.8, linewidth=0, label=name, step=step)
        below = below + height


def _happened(axes: Axes, evidence: Evidence, axis: TimeAxis, most_ms: float) -> None:
    """A mark at each event that is worth a look, above the steps."""
    kinds: dict[str, list[float]] = {}
    for event in evidence.record.events:
        if (event["kind"] not in EVERYDAY_EVENTS or event["kind"] == "resume") and event.get("time_s") is not None:
            kinds.setdefault(event["kind"], []).append(event["time_s"])
    for place, (kind, times_s) in enumerate(kinds.items()):
        x = axis.scaled(np.clip(np.array(times_s), axis.begin_s, axis.end_s))
        label = f"{kind}, {len(x)} times" if len(x) > 1 else kind
        mark = _MARKS[place % len(_MARKS)]
        axes.plot(x[:200], np.full(len(x[:200]), 0.96 * most_ms), mark, color=BAD, markersize=6, label=label, zorder=5)


def _folded(axes: Axes, table: Mapping[str, Series], parts: Mapping[str, Series], period: int, period_s: float) -> None:
    """The last periods of a swing, step by step."""
    first = max(0, len(table["step"]) - _PERIODS * period)
    steps = table["step"][first:]
    if len(steps) <= 300:
        _areas(axes, steps, [ms[first:] for ms in parts.values()], list(parts), step="mid")
    else:
        curves = [binned(steps, ms[first:]) for ms in parts.values()]
        _areas(axes, curves[0].x, [curve.mean for curve in curves], list(parts))
    top = float(sum(ms[first:] for ms in parts.values()).max())  # type: ignore[union-attr]
    begin = float(steps[0]) + period
    axes.annotate(
        "", (begin, 1.12 * top), (begin + period, 1.12 * top),
        arrowprops={"arrowstyle": "|-|,widthA=.3,widthB=.3", "color": BAD},
    )  # fmt: skip
    axes.text(begin + period / 2, 1.2 * top, f"{period} steps, {show_duration(period_s)}", ha="center", color=BAD,
              weight="bold")  # fmt: skip
    axes.set_ylim(0, 1.5 * top)
    axes.set_ylabel("ms a step")
    axes.set_xlabel(f"steps: the last {_PERIODS} periods")


def memory(evidence: Evidence, axis: TimeAxis) -> Iterator[Shown]:
    """Memory against what was planned: over time where it was watched, else its peak."""
    record = evidence.record
    curves = _of_gpus(evidence, "mem_used_gib")
    is_host = not curves
    if is_host and not evidence.on_gpu:
        curves = _of_host(evidence, "rss_gib")
    limits = {
        "budget": (record.memory.get("budget_gib"), INK, "-"),
        "predicted peak": (record.memory.get("predicted_peak_gib"), BAD, "--"),
        "peak of torch": (record.memory.get("measured_peak_gib"), ACCENT, ":"),
    }
    if not curves and not record.memory:
        return
    if not curves or (is_host and evidence.on_gpu):
        yield from _peak(limits)
        return
    highest = max(float(values.max()) for _, values in curves.values())
    lines = {} if is_host else {name: line for name, line in limits.items() if line[0] is not None}
    with picture(WIDTH, 2.6) as drawn:
        axes = drawn.figure.add_subplot()
        axis.shade(axes)
        for place, (gpu, (at_s, values)) in enumerate(curves.items()):
            colour = ACCENT if len(curves) == 1 else SERIES[place % len(SERIES)]
            label = "this process and its workers" if is_host else "in use" if len(curves) == 1 else f"GPU {gpu}"
            _curve(axes, binned(axis.scaled(at_s), values), colour, label)
        for name, (size_gib, colour, style) in lines.items():
            axes.axhline(size_gib, color=colour, linestyle=style, linewidth=1.1, label=f"{name}, {show_gib(size_gib)}")
        top = max([highest, *(line[0] for line in lines.values())])
        axes.set_ylim(0, 1.06 * top)
        axes.set_ylabel("GiB")
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)
        axis.put_under(axes)
        _legend(drawn.figure, axes)
        told = "; ".join(f"{name} {show_gib(line[0])}" for name, line in lines.items())
        drawn.told = f"{'Host' if is_host else 'Device'} memory over time, at most {show_gib(highest)}. {told}."
    yield Shown(drawn.svg, "Resident memory." if is_host else "Memory in use on the device, by all processes.")


def _peak(limits: Mapping[str, tuple[float | None, str, str]]) -> Iterator[Shown]:
    """Bars."""
    sizes = {name: size_gib for name, (size_gib, _, _) in limits.items() if size_gib is not None}
    with picture(WIDTH, 0.6 + 0.4 * len(sizes)) as drawn:
        axes = drawn.figure.add_subplot()
        axes.barh(list(sizes), list(sizes.values()), color=ACCENT, alpha=0.8, height=0.6)
        for place, size_gib in enumerate(sizes.values()):
            axes.text(size_gib, place, f" {show_gib(size_gib)}", va="center")
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        drawn.told = "; ".join(f"{name} {show_gib(size_gib)}" for name, size_gib in sizes.items())
    yield Shown(drawn.svg)


def metrics(evidence: Evidence, axis: TimeAxis) -> Iterator[Shown]:
    """A picture of each metric, with its splits."""
    by_name: dict[str, dict[str, tuple[Series, Series]]] = {}
    for (split, name), curve in evidence.metrics.items():
        if split != "throughput":
            by_name.setdefault(name, {})[split] = curve
    drawn_ones = [(name, splits) for name, splits in by_name.items() if any(len(steps) > 1 for steps, _ in splits.values())]
    for name, splits in drawn_ones[:MOST_METRICS]:
        yield _metric(name, splits)


def _metric(name: str, splits: Mapping[str, tuple[Series, Series]]) -> Shown:
    captions = []
    with picture(3.9, 2.3) as drawn:
        axes = drawn.figure.add_subplot()
        for place, (split, (steps, values)) in enumerate(sorted(splits.items(), key=lambda one: one[0] != "train")):
            colour = (SERIES[2], SERIES[0], SERIES[1], SERIES[3])[place % 4]
            curve = binned(steps, values)
            mark = "o" if np.isfinite(curve.x).sum() < 40 else ""
            _curve(axes, curve, colour, split, mark)
            captions.append(f"{split} {show_figure(float(values[-1]))}")
            missing = int((~np.isfinite(values)).sum())
            if missing:
                captions[-1] += f" ({missing} of {len(values)} not finite, first at step {steps[~np.isfinite(values)][0]:.0f})"
        axes.set_xlabel("step")
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)
        _legend(drawn.figure, axes)
        drawn.told = f"{name} over steps; latest: {', '.join(captions)}."
    return Shown(drawn.svg, f"latest: {', '.join(captions)}", name)


def _rows(figure: Figure, heights: Sequence[float]) -> list[Axes]:
    return list(figure.subplots(len(heights), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])


def _curve(axes: Axes, curve: Binned, colour: str = ACCENT, label: str = "", mark: str = "") -> None:
    if curve.is_thinned:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(curve.x, curve.mean, color=colour, linewidth=1.2, label=label or "_", marker=mark, markersize=3)


def _scale(axes: Axes, top: float, unit: str) -> None:
    axes.set_ylim(0, 1.04 * top if unit != "%" else 125)
    if unit == "%":
        axes.set_yticks([0, 50, 100])
    axes.set_ylabel(unit)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9, handlelength=1.3, columnspacing=1.2,
                      borderpad=0)  # fmt: skip


def _thinned(number: int, noun: str = "reading") -> str:
    from wellfed.report.curve_bins import MOST

    return f", {counted(number, noun)}" + (", mean and range of those that lie together" if number > MOST else "")
