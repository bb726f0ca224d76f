"""The sweeper of ``python src/train.py -m``: hands the command line to a sweep or a search of `wellfed.study`."""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write


class WellfedSweeper(Sweeper):
    """Runs short timed trials with an option of ``sweep``, else whole trainings."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra passes before `sweep`."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        """Runs the sweep or the search; returns its exit code."""
        from wellfed.config.multirun import Multirun
        from wellfed.errors import ConfigError
        from wellfed.process import MAY_FORK
        from wellfed.study.points.grid import NO_AXES, group_of

        assert self.hydra_context is not None
        assert self.config is not None
        multirun = Multirun(
            self.hydra_context.config_loader,
            self.config,
            params=self.params,
            arguments=arguments,
            group_of=group_of,
            no_axes=NO_AXES,
        )
        is_sweep = "sweep" in multirun.choices
        if is_sweep and (search := multirun.choices.get("search")):
            problem = f"times short trials, and search={search} runs whole trainings: not both."
            raise ConfigError.of(f"sweep={multirun.choices['sweep']}", problem, "Leave one of them out.")
        hydra = self.config.hydra
        is_typed = any(text.lstrip("+").startswith("hydra/launcher=") for text in hydra.overrides.hydra)
        is_other = is_typed or hydra.runtime.choices["hydra/launcher"] != "basic"  # Hydra's default
        is_forked = not is_other and (MAY_FORK or is_sweep or "search" in multirun.choices)
        launch = None if is_forked else self._launch
        if is_sweep:
            from wellfed.study.sweep import run_sweep

            return run_sweep(multirun, launch)
        from wellfed.study.search.searching import NothingToRank, run_search

        try:
            return run_search(multirun, launch)
        except NothingToRank as error:
            if "search" in multirun.choices:
                raise
            print(f"{error.faults[0].where}: {error.problem} They are run without.", file=sys.stderr)
            return self._basic().sweep(arguments)

    def _basic(self) -> Sweeper:
        """Returns Hydra's own sweeper."""
        assert self.hydra_context is not None
        assert self.config is not None
        from wellfed.config.hydra_internals import BASIC_SWEEPER

        with read_write(self.config.hydra), open_dict(self.config.hydra):
            self.config.hydra.sweeper = {"_target_": BASIC_SWEEPER, "max_batch_size": None, "params": None}
        return Plugins.instance().instantiate_sweeper(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )

    def _launch(self, folder: str, jobs: list[list[str]]) -> object:
        """Runs each list of overrides by the chosen launcher of Hydra, whose own files go into ``folder``."""
        from wellfed import project

        assert self.hydra_context is not None
        assert self.config is not None
        with read_write(self.config.hydra), open_dict(self.config.hydra):
            self.config.hydra.sweep.dir = folder
            ray = self.config.hydra.launcher.get("ray")
            if ray is not None and ray.init.address not in (None, "local"):
                # A cluster that runs already takes no size from hydra-ray-launcher, and lacks this environment.
                ray.init.setdefault("object_store_memory", None)
                ray.init.setdefault("runtime_env", {"env_vars": {project.VARIABLE: str(project.root())}})
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )
        return launcher.launch(jobs, initial_job_idx=0)


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="wellfed",
    node={"_target_": f"{__name__}.WellfedSweeper", "max_batch_size": None, "params": None},
    provider="wellfed",
)
