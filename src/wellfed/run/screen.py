"""Shows a run on the terminal: the plan at its start, and where the time went at its end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from wellfed.explain.report.run_lines import show_value
from wellfed.explain.report.run_sections import sections
from wellfed.explain.report.text_table import TextColumn, TextTable
from wellfed.plan.run_plan import RunPlan
from wellfed.record import RunRecord, plain
from wellfed.units import show_bytes, show_text

RUN_FILES = (
    *("run.json", "report.html", "report.md", "steps.csv", "metrics.csv", "telemetry.csv", "checkpoints", "train.log"),
    *("tensorboard", "csv", "profile"),
)

_COLOURS = {"healthy": "green", "unknown": "magenta", "busy_machine": "yellow"}
_VALUE_WIDTH = 16
"""Columns of the longest value without a space."""


class Terminal(Console):
    """Console that goes quiet if its reader ends (``| head``) or its disk is full, while the run continues. Text is
    shown without markup, with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Renders any printed string, also in tables, with control characters escaped."""
        return super().render_str(show_text(text), **options)

    def show_json(self, data: Any) -> None:
        """Prints strict JSON for programs, without raw control characters."""
        text = json.dumps(plain(data), indent=2).replace("\x7f", "\\u007f")  # json escapes all other control characters
        self.print(text, soft_wrap=True)

    failure: OSError | None = None
    """The error of a failed write, unless the reader ended."""

    def on_broken_pipe(self) -> None:
        """Goes quiet. By default rich would end the process."""
        self._give_up()

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints like rich, until a write fails."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.failure = error
            self._give_up()

    def _give_up(self) -> None:
        self.quiet = True
        # Buffered output must not fail again when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plan_table(workload: str, plan: RunPlan, *, with_source: bool = False) -> TextTable:
    """Returns a table of all planned values with their reasons."""
    value = TextColumn("value", max_width=_VALUE_WIDTH)
    table = TextTable("knob", value, "because", title=f"Plan: {workload} on {plan.device.name}")
    for knob, decided in plan.knobs.items():
        because = f"{decided.source}: {decided.because}" if with_source else decided.because
        shown = f"{len(plan.stages)} stages" if knob == "memory.stages" else show_value(decided.value)
        table.add_row(knob, shown, because)
    return table


def show_start(console: Terminal, workload: str, resumed: Path | None) -> None:
    """Shows what starts, before torch is imported."""
    what = f"Training {workload}" if resumed is None else f"Resuming {resumed}"
    console.print(f"{what}: importing PyTorch, reading data, planning ...", soft_wrap=True)


def show_resume(console: Terminal, checkpoint: Path, step: int) -> None:
    """Shows from which checkpoint training resumes."""
    console.print(f"Resuming {checkpoint.parent.parent} at step {step} ({checkpoint.name})", soft_wrap=True)


def show_restart(console: Terminal, because: str, checkpoint: Path | None, step: int, changes: str) -> None:
    """Shows from which checkpoint training restarts after running out of memory, and with which changes."""
    where = f"Restarting from {checkpoint.name} of step {step}" if checkpoint else "No checkpoint yet: starting again"
    with_what = f" with {changes}" if changes else ""
    console.print(f"{because}\n{where}{with_what}", soft_wrap=True)


def show_folder(console: Terminal, folder: Path) -> None:
    """Shows the run folder, which is permanent once training has begun."""
    console.print(f"Run folder: {folder}\n", soft_wrap=True)


def show_plan(console: Terminal, workload: str, plan: RunPlan, notes: Sequence[str]) -> None:
    """Shows the plan, the predicted memory, and the notes of the data."""
    console.print(plan_table(workload, plan))
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in plan.parts.items() if size)
    if plan.predicted_peak_gib is None:
        console.print(f"Device memory before activations: {parts}")
    else:
        peak = show_bytes(plan.predicted_peak_gib * 2**30)
        console.print(f"Device memory, predicted: {peak} in {plan.peak_moment} ({parts})")
    for note in notes:
        console.print(f"Data: {note}", soft_wrap=True)


def show_differences(console: Terminal, name: str, found: Sequence[tuple[str, Any, Any]]) -> None:
    """Shows how a rerun differs from the original run."""
    console.print(f"Differs from {name}:" if found else f"Nothing differs from {name}.")
    for dotted, old, new in found:
        if dotted != "git.diff":
            console.print(f"  {dotted}: {old} -> {new}", soft_wrap=True)


def show_end(console: Terminal, record: RunRecord, first: Mapping[str, float], folder: Path) -> None:
    """Shows the sections of the report, without the plan, and the files."""
    console.print()
    for section in sections(record, first):
        for line in section.on_screen:
            is_bare = line.startswith(" ") or (section.name == "verdict" and line == section.on_screen[0])
            bullet = "" if is_bare else "- "
            colour = _COLOURS.get(line.partition(" ")[0]) if section.name == "findings" else None
            console.print(f"{bullet}{show_text(line)}", style=colour, soft_wrap=True)
    wandb = record.wandb
    if wandb and wandb["mode"] == "offline":
        parts = shlex.join(wandb["parts"])
        line = f"wandb (offline): wandb sync {parts}; to look at it here: wandb leet {shlex.quote(wandb['path'])}"
        console.print(line, soft_wrap=True)
    names = [name for name in RUN_FILES if (folder / name).exists()]
    console.print(f"Files: {folder} ({', '.join(names)})", soft_wrap=True)
