"""Measures the largest micro-batch for this device by running steps of a few sizes (``python -m wellfed fit``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from wellfed.cli.output import Answer
from wellfed.command_line import announce, command
from wellfed.config.compose import Composed, compose
from wellfed.config.quoting import quoted
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OK
from wellfed.explain.report.text_table import print_command, print_text
from wellfed.plan.predict.size_search import Probe
from wellfed.process import without_collections
from wellfed.units import show_bytes, show_gib


def main(argv: Sequence[str]) -> int:
    """Runs up to 6 sizes and prints a row for each, then the size to use. Returns 2 if not even one sample fits."""
    parser = argparse.ArgumentParser(
        prog=command("fit"),
        description="The micro-batch that this device can take, by running a few sizes. Leaves nothing behind.",
    )
    parser.add_argument("overrides", nargs="*", help=f"as for {command('train')}")
    parser.add_argument("--json", action="store_true", help="print {micro_batch, stopped_by, because, probes} as JSON")
    asked = parser.parse_intermixed_args(argv)
    composed: Composed[RunConfig] = compose([quoted(text) for text in asked.overrides])
    # Keeps output of the workload's code out of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext():
        announce("Fitting: importing PyTorch, reading data, building the model")
        with without_collections():
            from wellfed.run.fitting import fit  # imports torch, which --help and typos don't need

        with composed.without_folder() as inside:
            fitting = fit(inside, (lambda probe: None) if asked.json else _print_row)
    found, budget_gib = fitting.found, fitting.budget_gib
    if asked.json:
        print(json.dumps({"micro_batch": found.size, **asdict(found), "budget_gib": budget_gib}, indent=2))
    else:
        console = Answer()
        print_text(console, f"\nStopped by {found.stopped_by}: {found.because}.")
        if found.size is not None and not fitting.is_whole:
            print_command(console, "Use it:", f"{command('train')} {_typed(composed, found.size)}")
        elif found.size is not None and found.stopped_by != "batch":
            print_text(
                console,
                "A model with BatchNorm is never split: its statistics belong to the whole batch. "
                f"workload.effective_batch_size={found.size} changes what is learned; GroupNorm could be split.",
            )
    if found.size is None:
        because = f"{found.because[:1].upper()}{found.because[1:]} {show_gib(budget_gib)}"
        print(f"{because}. See: {command('plan')}", file=sys.stderr)
        return EXIT_NOTHING_RUN
    return EXIT_OK


def _print_row(probe: Probe) -> None:
    """Prints a probe when it has ended, to show progress."""
    print_text(Answer(), row_of(probe))


def row_of(probe: Probe) -> str:
    """Returns size and peak in a line."""
    found = "out of memory" if probe.peak is None else f"peak {show_bytes(probe.peak.total)}"
    return f"micro-batch {probe.size:,}: {found}"


def _typed(composed: Composed[RunConfig], micro_batch: int) -> str:
    """Returns the typed overrides, with the measured micro-batch instead of the knobs that split a step."""
    splits = ("memory.micro_batch", "memory.accumulate")
    kept = [text for text in composed.overrides if text.partition("=")[0].lstrip("+~") not in splits]
    kept.append(f"memory.micro_batch={micro_batch}")
    if any(text.partition("=")[0] == "experiment" for text in kept) and composed.config.memory.accumulate is not None:
        kept.append("memory.accumulate=null")
    return shlex.join(kept)
