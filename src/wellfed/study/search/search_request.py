"""Reads what search a command line asks for; nothing is composed or imported yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig, SearchSampler
from wellfed.errors import ConfigError
from wellfed.process import MAY_FORK
from wellfed.study.executors.executor import Launch
from wellfed.study.points import space as spaces
from wellfed.study.points.grid import Grid, GridPoint, group_of, point_of
from wellfed.study.points.space import Axis, grid_values, space_of
from wellfed.study.study import check_one_machine, masked_values, named_folder
from wellfed.units import counted


@dataclass(frozen=True)
class SearchRequest:
    """Name, folder and space of a search."""

    name: str
    folder: Path
    space: dict[str, Axis]
    fixed: tuple[str, ...]
    """Overrides that all trials share, without those of the search itself: each trial is a run like any other."""
    way_on: str
    """Command that goes on where this one has stopped."""

    @property
    def grid(self) -> Grid:
        """Grid of all points; the space must be finite."""
        return Grid(grid_values(self.space), self.fixed)

    def probes(self) -> Iterator[GridPoint]:
        """Yields points of a sampler's space: all axes at one end, at the other, in between."""
        for share in (0.0, 1.0, 0.5):
            values = {name: axis.at(share) for name, axis in self.space.items()}
            yield point_of(values, self.fixed)


def asked_for(multirun: Multirun, base: Composed[RunConfig], launch: Launch | None) -> SearchRequest:
    """Returns what a command line asks for.

    Raises:
        ConfigError: no search can be made of it.
    """
    config, option = base.config, base.choices.get("search")
    options, chosen = config.search, f"search={option}" if option else "-m"
    is_grid = options.sampler is SearchSampler.grid
    varied, fixed = multirun.varied(may_be_interval=not is_grid)
    if "workload" in varied:
        values = varied["workload"].values
        problem = "is no axis of a search: metrics of different workloads are no comparison."
        way_out = f"Search one after the other: workload={values[0]}; hydra/sweeper=basic only runs them."
        raise ConfigError.of(f"workload={','.join(values)}", problem, way_out)
    check_one_machine(config)
    space = space_of(varied)
    if option and not space:
        way_out = "Name what varies: workload.optimizer.lr=0.01,0.001"
        if not is_grid:
            way_out = 'Name what varies: "workload.optimizer.lr=interval(1e-4,1e-1)"'
        raise ConfigError.of(chosen, "has no axis: nothing varies.", way_out)
    name = options.name or option or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = named_folder(multirun, config, "search", name)
    number = spaces.size(space)
    if is_grid and number is not None and number > options.max_trials:
        listed = " x ".join(f"{axis.size} of {name}" for name, axis in space.items())
        problem = f"{counted(number, 'whole training')} ({listed}), and search.max_trials={options.max_trials}."
        raise ConfigError.of(chosen, problem, f"Name fewer values, or set search.max_trials={number}.")
    secret = next((axis for axis, each in varied.items() if masked_values(axis, each.values) != each.values), None)
    if secret and not is_grid:
        problem = "is a secret by its name, and Optuna would write its values down."
        raise ConfigError.of(secret, problem, "Take it out of the axes, or name a grid of values, with search=grid.")
    if launch is not None and not is_grid:
        problem = "asks for each trial when another has ended, which other launchers can't."
        raise ConfigError.of(chosen, problem, "Leave out hydra/launcher, or name a grid of values, with search=grid.")
    if launch is None and not MAY_FORK:
        problem = "starts trials by forking, which this system does not offer."
        raise ConfigError.of(chosen, problem, "Add hydra/launcher=basic: a grid, all in one process.")
    is_named = bool(option or options.name or multirun.typed_dir)
    way_on = "The same command" if is_named else f"The same command with search.name={name}"
    own = tuple(text for text in fixed if group_of(text) not in ("search", "hydra"))
    return SearchRequest(name, folder, space, own, way_on)
