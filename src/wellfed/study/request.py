"""Reads which sweep or search a command line asks for; no point is composed and torch is not imported yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wellfed.config.compose import Composed
from wellfed.config.hydra_session import COMPOSE_ERRORS
from wellfed.config.multirun import Multirun, Varied
from wellfed.config.schema import RunConfig, SearchSampler
from wellfed.errors import ConfigError, Fault
from wellfed.masking import masked_override
from wellfed.process import MAY_FORK
from wellfed.record.entries import differences
from wellfed.run.folder.run_folder import new_name
from wellfed.study.executors.executor import Launch
from wellfed.study.points import space as spaces
from wellfed.study.points.grid import Grid, group_of, of_one_run, point_of
from wellfed.study.points.space import Axis, Choices, grid_values, space_of
from wellfed.units import counted

SAME_COMMAND = "The same command"
_NAME = re.compile(r"\w[\w.-]*")
_BESIDE_THE_MODEL = ("loader", "memory", "gpu", "trainer")
"""Groups of which no knob changes data or model."""


@dataclass(frozen=True)
class StudyRequest:
    """Name, folder and points of a sweep or a search."""

    name: str
    folder: Path
    space: dict[str, Axis]
    """Knob or group that varies -> its values."""
    fixed: tuple[str, ...]
    """Overrides that all trials share."""
    way_on: str = SAME_COMMAND
    """Command that goes on where this one has stopped."""

    @property
    def grid(self) -> Grid:
        """Grid of all points; the space must be finite."""
        return Grid(grid_values(self.space), self.fixed)

    @property
    def shares_model(self) -> bool:
        """Whether all points surely have the same data and model, by the names of the axes."""
        names = (name.lstrip("+") for name in self.space)
        return all(group_of(name) in _BESIDE_THE_MODEL or name.startswith("workload.optimizer.") for name in names)


def study_request(
    noun: Literal["sweep", "search"], multirun: Multirun, base: Composed[RunConfig], launch: Launch | None
) -> StudyRequest:
    """Returns the sweep or the search that a command line asks for.

    The overrides of a search lack those of the search itself: each trial is a run like any other.

    Raises:
        ConfigError: none can be made of it.
    """
    config, option, is_sweep = base.config, base.choices.get(noun), noun == "sweep"
    chosen = f"{noun}={option}" if option else "-m"
    is_grid = is_sweep or config.search.sampler is SearchSampler.grid
    varied, fixed = multirun.varied(may_be_interval=not is_grid)
    asked_name, most = (
        (config.sweep.name, config.sweep.max_trials) if is_sweep else (config.search.name, config.search.max_trials)
    )
    name = asked_name or option or new_name()
    folder = _folder(noun, name, multirun, config, varied)
    space: dict[str, Axis] = (
        space_of(varied) if not is_sweep else {axis: Choices(each.values) for axis, each in varied.items()}
    )
    if option and not space:
        way_out = 'Name what varies: "workload.optimizer.lr=interval(1e-4,1e-1)"'
        if is_grid:
            example = "loader=baseline,balanced" if is_sweep else "workload.optimizer.lr=0.01,0.001"
            way_out = f"Name values of one knob at least: {example}"
        raise ConfigError.of(chosen, "has no axis: nothing varies.", way_out)
    number = spaces.size(space)
    if is_grid and number is not None and number > most:
        what, knob = "combination" if is_sweep else "whole training", f"{noun}.max_trials"
        listed = " x ".join(f"{axis.size:,} of {name}" for name, axis in space.items())
        problem = f"{counted(number, what)} ({listed}), and {knob}={most}."
        raise ConfigError.of(chosen, problem, f"Name fewer values, or set {knob}={number}.")
    typed = {
        axis: [f"{axis}={value}" for value in each.values or map(str, each.interval or ())]
        for axis, each in varied.items()
    }
    secret = next((axis for axis, texts in typed.items() if texts != [*map(masked_override, texts)]), None)
    if secret is not None:
        problem = f"is a secret by its name, and a {noun} writes the values of its axes down."
        raise ConfigError.of(secret, problem, "Take it out of the axes: an environment variable can hold it.")
    if launch is not None and not is_grid:
        problem = "asks for each trial when another has ended, which other launchers can't."
        raise ConfigError.of(chosen, problem, "Leave out hydra/launcher, or name a grid of values, with search=grid.")
    if launch is None and not MAY_FORK:
        problem = "starts trials by forking, which this system does not offer."
        raise ConfigError.of(chosen, problem, "Add hydra/launcher=basic: a grid, all in one process.")
    if option:
        _check_option(noun, option, multirun, fixed)
    is_named = bool(option or asked_name or multirun.typed_dir)
    way_on = SAME_COMMAND if is_named else f"{SAME_COMMAND} with {noun}.name={name}"
    return StudyRequest(name, folder, space, fixed if is_sweep else tuple(of_one_run(fixed)), way_on)


def probe_of(
    asked: StudyRequest, compose: Callable[[Sequence[str], Path], Composed[RunConfig]], *, is_grid: bool
) -> Composed[RunConfig]:
    """Returns the configuration of the first point that composes; a sampler's is in the middle of each axis.

    Raises:
        ConfigError: no point composes; the faults of the first.
    """
    first: ConfigError | None = None
    middle = {} if is_grid else {name: axis.middle for name, axis in asked.space.items()}
    for point in asked.grid.points() if is_grid else [point_of(middle, asked.fixed)]:
        try:
            return compose(point.overrides, asked.folder / point.id)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def _folder(
    noun: Literal["sweep", "search"], name: str, multirun: Multirun, config: RunConfig, varied: Mapping[str, Varied]
) -> Path:
    """Returns the folder of the study of this name, unless another one was typed.

    Raises:
        ConfigError: the name can't be that of a folder, or the trials could not be compared or run.
    """
    if "workload" in varied:
        values = varied["workload"].values
        figures = "samples/s" if noun == "sweep" else "metrics"
        problem = f"is no axis of a {noun}: {figures} of different workloads are no comparison."
        way_out = f"{noun.capitalize()} one after the other: workload={values[0]}"
        way_out += "; hydra/sweeper=basic only runs them." if noun == "search" else ""
        raise ConfigError.of(f"workload={','.join(values)}", problem, way_out)
    if config.trainer.num_nodes > 1:
        where = f"trainer.num_nodes={config.trainer.num_nodes}"
        raise ConfigError.of(where, "a trial is on one machine.", "Set trainer.num_nodes=1.")
    if not _NAME.fullmatch(name):
        problem = "becomes the name of a folder: letters, digits, '_', '-' and '.'."
        raise ConfigError.of(f"{noun}.name={name}", problem, f"Write {noun}.name=my_{noun}.")
    plural = {"sweep": "sweeps", "search": "searches"}[noun]
    return multirun.typed_dir or Path(config.paths.log_dir) / config.workload.name / plural / name


def _check_option(group: Literal["sweep", "search"], option: str, multirun: Multirun, fixed: Sequence[str]) -> None:
    """Checks that an option sets only its own group: points, versions and printed commands leave it out.

    Raises:
        ConfigError: it sets knobs of other groups.
    """
    others = [text for text in fixed if text.partition("=")[0].lstrip("+") != group]
    try:
        without, own = map(multirun.unresolved, (others, fixed))
    except COMPOSE_ERRORS:  # of a value that an axis brings: points are composed later
        return
    faults = [
        Fault(
            f"{group}={option}",
            f"sets {knob}={value}, and an option of {group} may set only {group}.* and hydra.*.",
            f"Type {knob} on the command line, or set it in an option of experiment.",
        )
        for knob, _, value in differences(without, own)
        if group_of(knob) != group
    ]
    if faults:
        raise ConfigError(faults)
