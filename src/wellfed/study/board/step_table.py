"""Shows the conclusions of a tune on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console

from wellfed.command_line import command
from wellfed.explain.report.text_table import print_command, print_text
from wellfed.masking import masked_override
from wellfed.study.study_files import TuneFile
from wellfed.study.tune_gain import TuneGain
from wellfed.units import counted, show_duration, show_factor, show_line


def show(console: Console, file: TuneFile) -> None:
    """Prints conclusions, and the command to use; each trial has its line already."""
    console.print()
    for text in _conclusions(file):
        print_text(console, text)
    print_command(console, "Use it:", train_command(file.use))


def _conclusions(file: TuneFile) -> Iterator[str]:
    spent = f"{counted(len(file.steps), 'trial')} in {show_duration(file.trial_seconds)}"
    yield f"{spent}; ended because {file.ended_because}."
    if file.noise:
        yield file.noise
    if (comparison := file.comparison) is None:
        yield "Nothing that was tried is better than the start beyond noise: the start stays."
    else:
        took = show_duration(comparison.seconds)
        yield f"Start and result in turn ({took}): {gain_text(comparison.gain)}"
        if comparison.problem is not None:
            yield show_line(comparison.problem)
        if not file.result:
            yield "So the start stays."
    for each in file.advice:
        told = f"{' '.join(each['overrides'])}: {each['why_not']}, so it was not tried."
        yield f"Advice: {told} {show_line(each['message'])}"
    if file.written:
        yield f"Written: {file.written}"
    elif file.why_not is not None:
        yield f"No experiment was written: {file.why_not}."
    if file.unproven:
        yield f"Not proven: {train_command(file.unproven)}"


def gain_text(gain: TuneGain | None) -> str:
    """Returns what runs in turns have shown."""
    if gain is None:
        return "No round gave a rate of both: nothing is known of the gain."
    said = f"{show_factor(gain.factor)} times as good in rate"
    if gain.ci95 is None:
        return f"{said} in one round; it takes more to know noise from gain."
    low, high = map(show_factor, gain.ci95)
    verdict = "beyond noise" if gain.is_beyond_noise else "worse beyond noise" if gain.is_loss else "within noise"
    return f"{said} (95 % interval {low} to {high}, {gain.rounds} rounds in turns): {verdict}."


def train_command(overrides: Sequence[str]) -> str:
    """Returns the command to type, with secrets as ``***``."""
    return f"{command('train')} {shlex.join(map(masked_override, overrides))}".rstrip()
