"""The launcher beside the sweeper: jobs in processes of their own, one a GPU at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class WellfedLauncher(Launcher):
    """Launcher for any sweeper, e.g. Hydra's own: ``-m hydra/sweeper=basic seed=1,2,3``."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra passes before `launch`."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs and returns their exit codes; a job that died has one too."""
        from wellfed.study.executors.hydra_jobs import HydraJob, in_processes

        configs = [self._compose(initial_job_idx + number, each) for number, each in enumerate(job_overrides)]
        folders = [Path(str(cfg.hydra.sweep.dir)) / str(cfg.hydra.sweep.subdir) for cfg in configs]
        jobs = [
            HydraJob(partial(self._run, cfg), folder, int(cfg.trainer.devices))
            for cfg, folder in zip(configs, folders, strict=True)
        ]
        codes = in_processes(jobs)
        found = zip(job_overrides, configs, folders, codes, strict=True)
        return [
            JobReturn(each, cfg, cfg.hydra, str(folder), cfg.hydra.job.name, JobStatus.COMPLETED, code)
            for each, cfg, folder, code in found
        ]

    def _compose(self, number: int, overrides: Sequence[str]) -> DictConfig:
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
        return cfg

    def _run(self, cfg: DictConfig) -> int:
        """Runs a job; called in its own process."""
        done = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=cfg,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return int(done.return_value)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="wellfed",
    node={"_target_": f"{__name__}.WellfedLauncher"},
    provider="wellfed",
)
