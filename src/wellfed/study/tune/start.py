"""Reads the start of a tune from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from wellfed.command_line import typed_arguments
from wellfed.config.faults.override_faults import read_overrides
from wellfed.config.quoting import is_null, key_value, quoted, unquoted
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault
from wellfed.study.points.grid import group_of

NOT_MANY = "runs a grid, and a tune is one search. Leave it out: tune tries the values itself."
"""Why ``-m`` is refused."""
_ONE_TRAINING = "is about one training, and a tune is many short trials, none of which is kept."
_REFUSED = {
    "resume": (_ONE_TRAINING, "Leave it out; an interrupted tune goes on by the same command."),
    "rerun": (_ONE_TRAINING, "Leave it out; an interrupted tune goes on by the same command."),
    "sweep": ("names a grid, and tune chooses by itself what it tries.", "Leave it out."),
    "search": ("is about a search of whole trainings, and tune times short trials.", "Leave it out."),
    "sweep.name": ("has no effect on a tune.", "Write tune.name=<name>."),
    "sweep.max_trials": ("has no effect on a tune.", "Write tune.max_trials=<number>."),
    "sweep.fail_fast": ("has no effect on a tune.", "Leave it out: what fails is taken back, and the search goes on."),
    "sweep.objective": ("has no effect on a tune.", "Leave it out: a tune ranks by samples/s."),
}
"""Knob, or a group with all its knobs -> what is wrong with it, and the way out."""


def expand(overrides: Sequence[str], compose: Callable[[Sequence[str]], object]) -> list[str]:
    """Returns the overrides, quoted where Hydra's grammar would misread a path.

    Raises:
        ConfigError: all that have no meaning for a tune.
    """
    faults = [fault for text in overrides for fault in _faults(text)]
    if named := [text for text in typed_arguments() if text.startswith(("--config-name", "-cn"))]:
        problem = "names another primary configuration, and a tune starts from train.yaml."
        faults.append(Fault(named[0], problem, "Leave it out; an experiment can set any knob: experiment=<name>."))
    if faults:
        raise ConfigError(faults)
    return [quoted(text) for text in overrides]


def _faults(text: str) -> Iterator[Fault]:
    key, value = key_value(text)
    refused = _REFUSED.get("search" if group_of(text) == "search" else key)
    if refused is not None:
        if not is_null(unquoted(value)):
            yield Fault(text, *refused)
        return
    (typed,) = read_overrides([text], multirun=True)
    if typed.parsed is not None and typed.parsed.is_sweep_override():
        way_out = f"Write one value to start from; a list is {key}=[{value}]. The loader, memory and gpu are turned."
        yield Fault(text, "names several values, and a tune has one start.", way_out)


def of_the_start(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides of `python src/train.py` for the start."""
    return tuple(text for text in overrides if group_of(text) != "tune")


def of_trials(start: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Returns the overrides of its trials, which are watched even if the start is not: findings lead the search."""
    is_typed = any(text.lstrip("+").startswith(("telemetry=", "telemetry.enabled=")) for text in start)
    return (*start, *([] if config.telemetry.enabled or is_typed else ["telemetry=default"]))
