"""The sweeper of ``python src/train.py -m sweep=<option>``: hands the command line to `wellfed.trials.sweep`."""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore

from hydra_plugins.wellfed_sweep.launcher import WellfedLauncher


class WellfedSweeper(BasicSweeper):
    """Every combination of the axes is a row of a ledger, whatever becomes of it."""

    def sweep(self, arguments: list[str]) -> Any:
        """The exit code of the sweep."""
        from wellfed.config.multirun import Multirun
        from wellfed.sweep.grid import OF_THE_SWEEP, group_of
        from wellfed.trials.sweep import run_sweep

        assert self.hydra_context is not None
        assert self.config is not None
        launcher = self.launcher
        assert launcher is not None
        multirun = Multirun(
            self.hydra_context.config_loader,
            self.config,
            params=self.params,
            arguments=arguments,
            group_of=group_of,
            no_axes=(*OF_THE_SWEEP, "paths"),
        )
        is_ours = isinstance(launcher, WellfedLauncher)
        return run_sweep(multirun, None if is_ours else lambda jobs: launcher.launch(jobs, initial_job_idx=0))


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="wellfed",
    node={"_target_": f"{__name__}.WellfedSweeper", "max_batch_size": None, "params": None},
    provider="wellfed",
)
