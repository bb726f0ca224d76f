"""Shows a run on the terminal: what starts, with which plan, and the screen at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from wellfed.explain.report.text_table import TextTable
from wellfed.record.files import plain
from wellfed.units import counted, show_bytes, show_text, wrapped

if TYPE_CHECKING:  # the first line appears before numpy is imported
    from wellfed.explain.diagnosis.evidence import Evidence
    from wellfed.plan.run_plan import RunPlan


class Terminal(Console):
    """Console that goes quiet if its reader ends (``| head``) or its disk is full, while the run continues. Text is
    shown without markup, with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})
        if not self.encoding.startswith("utf") and hasattr(self.file, "reconfigure"):
            self.file.reconfigure(errors="backslashreplace")  # a name with other characters must not end the run

    @property
    def columns(self) -> int | None:
        """Columns of the terminal; None for a file, whose lines are as long as their text."""
        return self.width if self.is_terminal else None

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

    def _check_buffer(self) -> None:
        """Writes what has been rendered, until a write fails."""
        try:
            super()._check_buffer()
        except OSError as error:
            self.failure = error
            self._give_up()

    def _give_up(self) -> None:
        self.quiet = True
        # Buffered output must not fail again when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def plan_table(workload: str, plan: RunPlan) -> TextTable:
    """Returns a table of all planned values with their reasons."""
    from wellfed.explain.report.run_lines import show_value

    table = TextTable("knob", "value", "because", title=f"Plan: {workload} on {plan.device.name}")
    for knob, decided in plan.knobs.items():
        table.add_row(knob, show_value(decided.value), f"{decided.source}: {decided.because}")
    return table


def show_start(console: Terminal, workload: str, resumed: Path | None) -> None:
    """Shows what starts, before torch is imported."""
    what = f"Training {workload}" if resumed is None else f"Resuming {resumed}"
    console.print(_fitted(f"{what}: importing PyTorch, reading data, planning ...", console.columns), soft_wrap=True)


def show_plan(console: Terminal, workload: str, plan: RunPlan, notes: Sequence[str], num_train: int | None) -> None:
    """Shows the plan in a few lines.

    Args:
        num_train: number of training samples; None = unknown.
    """
    data = " ".join(f"{note.rstrip('.')}." for note in notes).removesuffix(".")
    if not data and num_train is not None:
        data = f"{num_train:,} training samples"
    lines = [f"{workload}  {_device(plan)}", f"batch   {_batch(plan)}", f"loader  {_loader(plan)}"]
    for line in [*lines, *([f"data    {data}"] if data else [])]:
        console.print(_fitted(line, console.columns), soft_wrap=True)


def _device(plan: RunPlan) -> str:
    """Returns device, memory budget and precision."""
    trainer, device = plan.trainer, plan.device
    number = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    parts = [f"{number}{device.name}"]
    if device.memory_gib is not None:
        parts.append(f"budget {device.memory_gib:.1f} GiB{'' if plan.on_gpu else ' of a card that is not here'}")
    parts.append(device.precision)
    if device.compile != "none":
        parts.append(f"compile {device.compile}")
    if trainer.strategy != "auto":
        parts.append(trainer.strategy)
    return ", ".join(parts)


def _batch(plan: RunPlan) -> str:
    """Returns the samples of a step, how they are split, and the predicted peak of memory."""
    memory, devices = plan.memory, plan.trainer.world_size
    split = f" on {devices} devices" if devices > 1 else ""
    if memory.accumulate > 1:
        split += f" in micro-batches of {memory.micro_batch:,}"
    samples = plan.workload.effective_batch_size
    parts = [f"{samples:,} samples a step{split}" if samples else "samples of a step unknown before training"]
    if memory.features is not None:
        parts.append(f"features {memory.features}")
    if plan.predicted_peak_gib is not None:
        budget = "" if plan.device.memory_gib is None else f" of {plan.device.memory_gib:.1f} GiB"
        parts.append(f"predicted peak {show_bytes(plan.predicted_peak_gib * 2**30)}{budget}")
    return ", ".join(parts)


def _loader(plan: RunPlan) -> str:
    """Returns who builds the batches, and why."""
    loader = plan.loader
    workers = f", {counted(loader.num_workers, 'worker')}" if loader.num_workers else ""
    by = "no workers" if loader.backend == "inline" else f"{loader.backend}{workers}"
    return f"{by}: {loader.reasons['backend'].because}"


def _fitted(line: str, columns: int | None) -> str:
    """Returns the line, cut between words to the width of a terminal."""
    return line if columns is None or len(line) <= columns else f"{wrapped(line, columns - 4)[0]} ..."


def show_end(console: Terminal, evidence: Evidence, folder: Path) -> None:
    """Shows the verdict, where the time went, and what to type next."""
    from wellfed.explain.report.last_screen import last_lines

    console.print()
    for line in last_lines(evidence, folder, console.columns):
        console.print(line, soft_wrap=True)
