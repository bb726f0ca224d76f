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
    print_text(console, "\n".join(["", *filter(None, _conclusions(file))]))
    print_command(console, "Use it:", train_command(file.use))


def _conclusions(file: TuneFile) -> Iterator[str]:
    spent = f"{counted(len(file.steps), 'trial')} in {show_duration(file.trial_seconds)}"
    yield f"{spent}; ended because {file.ended_because}."
    yield file.noise
    if (comparison := file.comparison) is None:
        yield "Nothing that was tried is better than the start beyond noise: the start stays."
    else:
        yield f"Start and result in turn ({show_duration(comparison.seconds)}): {gain_text(comparison.gain)}"
        yield show_line(comparison.problem or "")
        yield "" if file.result else "So the start stays."
    for each in file.advice:
        why_not = f"Advice: {' '.join(each['overrides'])}: {each['why_not']}, so it was not tried."
        yield f"{why_not} {show_line(each['message'])}"
    if file.written or file.why_not is not None:
        yield f"Written: {file.written}" if file.written else f"No experiment was written: {file.why_not}."
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
