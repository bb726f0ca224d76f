"""Builds the sections of a report: one list for report.html, report.md and the last screen."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wellfed.explain.report import run_lines
from wellfed.record import RunRecord, engine_version
from wellfed.units import show_percent

Name = Literal[
    "verdict", "findings", "utilisation", "time", "memory", "metrics", "files", "plan", "profile", "machine", "events",
    "started",
]  # fmt: skip
OF_EVERY_RUN = frozenset({"report", "page", "steps", "metrics", "telemetry", "log", "last", "best", "profile"})
"""Names of the artifacts that every run writes; a workload's evaluation wrote the others."""
Row = tuple[str, ...]
_SHOWN, _NAME_WIDTH = 10, 100
"""Operations of a profile on the last screen, and characters shown of a name: a kernel's may have hundreds."""


@dataclass(frozen=True)
class ReportSection:
    """Section of a report: lines, a table, or both."""

    name: Name
    title: str
    lines: Sequence[str] = ()
    """Sentences or short phrases, one a line."""
    head: Row = ()
    """Head of the table; empty without a table."""
    rows: Sequence[Row] = ()
    screen: Sequence[str] | None = None
    """Lines of the last screen instead of `lines`; one that begins with a blank is a row of a table."""
    folded: str = ""
    """Summary that the page shows until the section is opened; empty: all of it."""

    @property
    def on_screen(self) -> Sequence[str]:
        """Lines of the last screen."""
        return self.lines if self.screen is None else self.screen


def sections(record: RunRecord, first: Mapping[str, float] | None = None) -> list[ReportSection]:
    """Returns all sections of a run, in the order in which a reader asks.

    Args:
        first: the first value of each metric, where it is known.
    """
    begin, error = [run_lines.headline(record), *run_lines.state_lines(record)], run_lines.error_lines(record)
    rest = [run_lines.amount_line(record), *run_lines.simulated_lines(record), *run_lines.speed_lines(record)]
    begun = {name: run_lines.show_figure(value) for name, value in (first or {}).items()}
    metrics = [(name, begun.get(name, ""), run_lines.show_figure(value)) for name, value in record.metrics.items()]
    changed = [f" (first {begun})" if begun not in ("", latest) else "" for _, begun, latest in metrics]
    metric_lines = [f"{name} {latest}{change}" for (name, _, latest), change in zip(metrics, changed, strict=True)]
    tested = [] if record.tested is None else [f"test/ is of {record.tested}"]
    plan = [
        (knob, run_lines.show_value(one["value"]), one["source"], one["because"]) for knob, one in record.plan.items()
    ]
    utilisation = run_lines.gpu_lines(record) or run_lines.host_lines(record)
    if record.swing is not None and record.swing["period_steps"] is None:
        utilisation.append(run_lines.swing_line(record.swing))
    findings = [f"{finding['id']} ({finding['severity']}): {finding['text']}" for finding in record.findings]
    events, warnings = run_lines.event_rows(record.events), run_lines.warning_lines(record)
    return [
        # stderr has shown the error, so the screen leaves it out.
        ReportSection("verdict", "Verdict", [*begin, *error, *rest], screen=[*begin, *rest]),
        ReportSection("findings", "What to change", findings),
        ReportSection("utilisation", "Utilisation", utilisation),
        ReportSection("time", "Where the time went", run_lines.time_lines(record)),
        ReportSection("memory", "Memory", run_lines.memory_lines(record)),
        ReportSection(
            "metrics", "Metrics", tested, ("metric", "first", "latest"), metrics, screen=[*metric_lines, *tested]
        ),
        *file_sections(record),
        # The screen shows the plan when the run begins.
        ReportSection("plan", "Plan", (), ("knob", "value", "source", "because"), plan, screen=()),
        *profile_sections(record),
        ReportSection("machine", "Machine", run_lines.machine_lines(record), screen=()),
        ReportSection(
            *("events", "Events", (), ("step", "event", "facts"), events),
            screen=warnings,
            folded=run_lines.events_line(record),
        ),
        ReportSection("started", "Started with", started_lines(record), screen=()),
    ]


def own_files(record: RunRecord) -> dict[str, str]:
    """Returns the files of the workload's evaluation by name, relative to the run folder."""
    return {name: path for name, path in record.artifacts.items() if name not in OF_EVERY_RUN}


def file_sections(record: RunRecord) -> list[ReportSection]:
    """Returns the files that the workload's evaluation wrote."""
    files = own_files(record)
    if not files:
        return []
    on_screen = [f"of the evaluation: {', '.join(files.values())}"]
    lines = [f"{name}: {path}" for name, path in files.items()]
    return [ReportSection("files", "What the evaluation left", lines, screen=on_screen)]


def profile_sections(record: RunRecord) -> list[ReportSection]:
    """Returns the operations of the profiled steps."""
    profile, lines = record.profile, run_lines.profile_lines(record)
    if profile is None:
        return []
    by = "GPU" if profile["by"] == "device" else "CPU"
    head = (f"{by} ms a step", "share", "calls a step", "operation")
    rows: list[Row] = [
        (
            f"{one['ms_per_step']:.3f}",
            show_percent(one["share_frac"]),
            f"{one['calls'] / max(1, profile['steps']):.4g}",
            _cut(one["name"], _NAME_WIDTH),
        )
        for one in profile["operations"]
    ]
    on_screen = [*lines, *_aligned([head, *rows[:_SHOWN]])]
    return [ReportSection("profile", "Profile of steps", lines, head, rows, screen=on_screen)]


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Returns lines of a terminal: figures in columns, then a name."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", *(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))])
        + f"  {_cut(row[-1], 80 - sum(widths[:-1]) - 2 * len(row))}"
        for row in rows
    ]


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


def started_lines(record: RunRecord) -> list[str]:
    """Returns the command that repeats the run, and the code that it ran."""
    lines = [
        f"overrides: {shlex.join(record.overrides) or 'none'}",
        f"seed {record.seed}",
        f"began {record.started_at}",
    ]
    if record.git:
        lines.append(f"commit {record.git['commit']}{', with uncommitted changes' if record.git['dirty'] else ''}")
    if record.engine and not record.engine["within_project"]:
        lines.append(engine_version(record.engine))
    if record.resumed_from:
        lines.append(f"resumed from {record.resumed_from}")
    return lines
