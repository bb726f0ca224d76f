"""Builds the sections of a report: one list for report.html and report.md."""

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
_NAME_WIDTH = 100
"""Characters shown of the name of an operation; a kernel's may have hundreds."""


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
    folded: str = ""
    """Summary that the page shows until the section is opened; empty: all of it."""


def sections(record: RunRecord, first: Mapping[str, float] | None = None) -> list[ReportSection]:
    """Returns all sections of a run, in the order in which a reader asks.

    Args:
        first: the first value of each metric, where it is known.
    """
    begin, error = [run_lines.headline(record), *run_lines.state_lines(record)], run_lines.error_lines(record)
    rest = [run_lines.amount_line(record), *run_lines.simulated_lines(record), *run_lines.speed_lines(record)]
    begun = {name: run_lines.show_figure(value) for name, value in (first or {}).items()}
    metrics = [(name, begun.get(name, ""), run_lines.show_figure(value)) for name, value in record.metrics.items()]
    tested = [] if record.tested is None else [f"test/ is of {record.tested}"]
    plan = [
        (knob, run_lines.show_value(one["value"]), one["source"], one["because"]) for knob, one in record.plan.items()
    ]
    utilisation = run_lines.gpu_lines(record) or run_lines.host_lines(record)
    if record.swing is not None and record.swing["period_steps"] is None:
        utilisation.append(run_lines.swing_line(record.swing))
    findings = [f"{finding['id']} ({finding['severity']}): {finding['text']}" for finding in record.findings]
    events = run_lines.event_rows(record.events)
    return [
        ReportSection("verdict", "Verdict", [*begin, *error, *rest]),
        ReportSection("findings", "What to change", findings),
        ReportSection("utilisation", "Utilisation", utilisation),
        ReportSection("time", "Where the time went", run_lines.time_lines(record)),
        ReportSection("memory", "Memory", run_lines.memory_lines(record)),
        ReportSection("metrics", "Metrics", tested, ("metric", "first", "latest"), metrics),
        *file_sections(record),
        ReportSection("plan", "Plan", (), ("knob", "value", "source", "because"), plan),
        *profile_sections(record),
        ReportSection("machine", "Machine", run_lines.machine_lines(record)),
        ReportSection("events", "Events", (), ("step", "event", "facts"), events, folded=run_lines.events_line(record)),
        ReportSection("started", "Started with", started_lines(record)),
    ]


def own_files(record: RunRecord) -> dict[str, str]:
    """Returns the files of the workload's evaluation by name, relative to the run folder."""
    return {name: path for name, path in record.artifacts.items() if name not in OF_EVERY_RUN}


def file_sections(record: RunRecord) -> list[ReportSection]:
    """Returns the files that the workload's evaluation wrote."""
    files = own_files(record)
    if not files:
        return []
    return [ReportSection("files", "What the evaluation left", [f"{name}: {path}" for name, path in files.items()])]


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
    return [ReportSection("profile", "Profile of steps", lines, head, rows)]


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
    if upload := run_lines.wandb_upload(record):
        lines.append(f"wandb is offline; to upload the run: {' '.join(upload)}")
    return lines
