"""Shows every number of a run with its reason, for this machine or other GPUs (``python -m wellfed plan``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from wellfed.cli.output import Answer
from wellfed.command_line import announce, command
from wellfed.config.compose import Composed, compose
from wellfed.config.files.experiment_file import free_path, write_experiment
from wellfed.config.files.option_file import Value
from wellfed.config.quoting import quoted
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OK
from wellfed.explain.report.text_table import TextTable, print_text
from wellfed.masking import masked_override
from wellfed.observe.hardware.profiles import PROFILES
from wellfed.plan.run_plan import DryPlan, left_to_loader
from wellfed.process import without_collections
from wellfed.run.screen import plan_table
from wellfed.units import show_bytes, show_gib

_NOT_WRITTEN = ("trainer.accelerator", "workload.effective_batch_size")
"""Knobs left out of the file: one depends on the machine, the other belongs to the workload."""


def main(argv: Sequence[str]) -> int:
    """Prints the plan without training. Returns 0 if it fits its budget, 2 if it does not."""
    parser = argparse.ArgumentParser(
        prog=command("plan"), description="Every number of a run with its reason, without running it."
    )
    parser.add_argument(
        "overrides", nargs="*", help=f"as for {command('train')}, e.g. gpu=8gb memory=cache trainer.devices=8"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--write", metavar="NAME", help="write it as configs/experiment/NAME.yaml")
    parser.add_argument("--force", action="store_true", help="let --write replace a file of that name")
    asked = parser.parse_intermixed_args(argv)
    if asked.write is not None:
        free_path(asked.write, replaces=asked.force)
    composed: Composed[RunConfig] = compose([quoted(text) for text in asked.overrides])
    # Keeps output of the workload's code out of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext():
        announce("Planning: importing PyTorch, reading data, building the model")
        with without_collections():
            from wellfed.run.planner import plan_without_running  # imports torch, which --help and typos don't need

        with composed.without_folder() as inside:
            found = plan_without_running(inside)
    if asked.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, sys.stdout)
    if found.plan.misfit is not None:
        print(found.plan.misfit, file=sys.stderr)
        return EXIT_NOTHING_RUN
    if asked.write is not None:
        path = _write(asked.write, composed, found, replaces=asked.force)
        print(f"Written: {path}. Use it: {command('train')} experiment={asked.write}", file=sys.stderr)
    return EXIT_OK


def show(found: DryPlan, stream: IO[str]) -> None:
    """Prints the plan as tables."""
    plan = found.plan
    console = Answer(file=stream)
    if found.imagined is not None:
        print_text(console, found.imagined)
    console.print(plan_table(found.workload, plan))
    if plan.predicted_peak_gib is not None:
        title = f"Memory at its peak ({plan.peak_moment}), predicted"
        memory = TextTable("part", "bytes", title=title, numbers=["bytes"])
        total = plan.predicted_peak_gib * 2**30
        rows: dict[str, float] = {**plan.parts, "total": total}
        for name, size in rows.items():
            memory.add_row(name, show_bytes(size))
        console.print("", memory)
    for warning in plan.warnings:
        print_text(console, f"Warning: {warning}")


def _write(name: str, composed: Composed[RunConfig], found: DryPlan, *, replaces: bool) -> Path:
    knobs = found.plan.knobs
    values_of_plan = {knob: planned.value for knob, planned in knobs.items()}
    left_out = {*_NOT_WRITTEN, *left_to_loader(values_of_plan, composed.resolved["loader"])}
    values = {
        knob: Value(planned.value, f"{planned.source}: {planned.because}")
        for knob, planned in knobs.items()
        if knob not in left_out and planned.source != "data"
    }
    profile = PROFILES.get(composed.choices.get("gpu", "auto"))
    if profile is not None and found.plan.device.memory_gib == profile.budget_gib:
        del values["gpu.memory_gib"]  # set by the option, and a later gpu= must be able to change it
    typed = " ".join(shlex.quote(masked_override(text)) for text in composed.overrides)
    peak = found.plan.predicted_peak_gib
    predicted = "" if peak is None else f" Predicted peak: {show_gib(peak)} on each device."
    heading = f"{command('plan')} {typed} --write {name}\nPlanned for {found.plan.device.name}.{predicted}"
    return write_experiment(name, composed, values, heading=heading, replaces=replaces)
