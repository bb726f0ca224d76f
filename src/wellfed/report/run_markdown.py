"""Writes report.md: what a run did, in the order a reader asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from wellfed.record import RunRecord
from wellfed.report.run_lines import (
    event_rows,
    finding_lines,
    gpu_lines,
    memory_lines,
    profile_lines,
    profile_table,
    show_value,
    simulated_lines,
    time_lines,
)
from wellfed.units import show_count, show_duration

_NAME_WIDTH = 100
"""Of an operation: a kernel's may have hundreds of characters."""


def to_markdown(record: RunRecord) -> str:
    """The report of a run record."""
    headline = (
        f"Status **{record.status}** after {record.steps} steps, {record.epochs:.2f} epochs, "
        f"{show_count(record.samples)} samples, {show_duration(record.duration_s)}"
        f"{f'; ended by {record.ended_by}' if record.ended_by else ''}."
    )
    error = record.error
    said = f"> {error['kind']}: {error['message']} {error['advice']}".replace("\n", "\n> ") if error else None
    # A record read back has null where a figure was not finite.
    metrics = [(name, "not finite" if value is None else f"{value:.5g}") for name, value in record.metrics.items()]
    plan = [(knob, show_value(one["value"]), one["source"], one["because"]) for knob, one in record.plan.items()]
    parts = [
        f"# {record.workload}: {record.run_id}",
        headline,
        *simulated_lines(record),
        *([said] if said else []),
        *(["## What to change", "\n".join(f"- {line}" for line in finding_lines(record))] if record.findings else []),
        "## Where the time went",
        *time_lines(record),
        *(["## GPUs", "\n".join(f"- {line}" for line in gpu_lines(record))] if record.gpus else []),
        "## Metrics",
        _table(("metric", "value"), metrics),
        "## Memory",
        *memory_lines(record),
        "## Plan",
        _table(("knob", "value", "source", "because"), plan),
        *_profile(record),
        "## Events",
        _table(("step", "event", "facts"), event_rows(record.events)),
        "## Started with",
        f"`{' '.join(record.overrides) or '(no overrides)'}`, seed {record.seed}",
    ]
    return "\n\n".join(parts) + "\n"


def _profile(record: RunRecord) -> list[str]:
    lines = profile_lines(record)
    if not lines:
        return []
    return ["## Profile", "\n".join(f"- {line}" for line in lines), _table(*profile_table(record, _NAME_WIDTH))]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in row)} |" for row in rows]
    return "\n".join(lines) if len(lines) > 2 else "None."
