"""Shows this machine, its profile, and missing packages (``python -m wellfed doctor``)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from wellfed import __version__, project
from wellfed.command_line import command
from wellfed.errors import EXIT_OK
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.observe.loggers.wandb_sink import is_logged_in
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.doctor_checks import Examination, Surroundings, examine


def main(argv: Sequence[str]) -> int:
    """Prints the examination of this machine. Returns 0 whatever is missing. Takes seconds to import torch."""
    parser = argparse.ArgumentParser(
        prog=command("doctor"), description="The machine, the profile it maps to, what is missing."
    )
    parser.add_argument("--json", action="store_true", help="print {machine, profile, missing} as JSON")
    asked = parser.parse_args(argv)
    examination = examine(machine(torch_cuda()), surroundings(os.environ, Path.home()))
    if asked.json:
        print(json.dumps(examination.to_dict(), indent=2))
    else:
        show(examination, sys.stdout)
    return EXIT_OK


def surroundings(environ: Mapping[str, str], home: Path) -> Surroundings:
    """Returns the login, the compiler and the installed distributions."""
    compilers = [environ["CXX"]] if environ.get("CXX") else ["g++", "clang++", "cl"]
    return Surroundings(
        has_wandb_login=is_logged_in(environ, home),
        has_compiler=any(shutil.which(name, path=environ.get("PATH")) for name in compilers),
    )


def show(examination: Examination, stream: IO[str]) -> None:
    """Prints the examination: first what keeps torch from using the GPU, then the tables."""
    from wellfed.cli.output import Answer  # not for --help
    from wellfed.explain.report.text_table import TextTable, print_text

    console = Answer(file=stream)
    rest = [entry for entry in examination.missing if entry.what != "torch"]
    for entry in examination.missing:
        if entry.what == "torch":
            print_text(console, f"{entry.problem} {entry.way_out}\n", style="bold red")
    table = TextTable("", "", title="Machine")
    for name, value in [*_machine_rows(examination.machine), *_profile_rows(examination)]:
        table.add_row(name, value)
    console.print(table)
    if rest or not examination.missing:
        console.print("\nMissing:" if rest else "\nNothing is missing.", style="bold")
    for entry in rest:
        print_text(console, f"  {entry.what}: {entry.problem}")
        if entry.way_out:
            print_text(console, f"    {entry.way_out}")


def _machine_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    rows = [
        ("host", f"{facts.host}, {facts.os}"),
        ("cpu", f"{facts.cpu}, {facts.cpu_quota_cores:g} cores for this process"),
        ("ram", f"{facts.ram_gib:.1f} GiB, {facts.ram_available_gib:.1f} available"),
    ]
    if facts.shm_gib is not None and facts.shm_free_gib is not None:
        rows.append(("/dev/shm", f"{facts.shm_gib:.1f} GiB, {facts.shm_free_gib:.1f} free"))
    for gpu in facts.gpus:
        free = "" if gpu.free_gib is None else f", {gpu.free_gib:.1f} free"
        capability = "" if gpu.capability is None else f", capability {gpu.capability}"
        rows.append((f"gpu {gpu.index}", f"{gpu.describe()}{free}{capability}, {gpu.uuid or 'no UUID'}"))
        if gpu.holders:
            rows.append(("", f"held by {gpu.held_by()}"))
    rows.append(("engine", f"wellfed {__version__}, {project.ENGINE}"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())))
    return rows


def _profile_rows(examination: Examination) -> list[tuple[str, str]]:
    profile = examination.profile
    budget = "" if profile.budget_gib is None else f": {profile.budget_gib:.1f} GiB to plan with"
    return [
        ("profile", f"gpu={profile.profile}{budget}, {examination.precision}"),
        ("because", profile.because),
        *(("warning", warning) for warning in profile.warnings),
    ]
