"""Runs each trial as one job that submitit sends to Slurm, or starts here; the only module that imports submitit.

Slurm queues the jobs, so all are sent at once. On this machine a job starts when the one before has ended.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from wellfed.errors import ConfigError, first_line
from wellfed.observe.hardware.detect import machine
from wellfed.study.executors import trial_process
from wellfed.study.executors.executor import TICK_S, ExecutorLost, StudySettings, Trial
from wellfed.study.executors.remote import RemoteExecutor, Sent
from wellfed.study.executors.trial_process import ProcessAnswer, run_process

_GRACE_S = 10
_SHARED = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
    *("mem_gb", "nodes", "name", "stderr_to_stdout"),
)
"""Parameters that submitit has for every kind of cluster. Others are preceded by the kind's name."""


class SubmititExecutor(RemoteExecutor):
    """An executor on Slurm, or on this machine.

    Args:
        settings: settings of the study. What jobs print goes to ``.submitit`` in its folder.
        kind: kind of cluster.
        launcher: ``hydra.launcher``.
    """

    def __init__(self, settings: StudySettings, kind: Literal["slurm", "local"], launcher: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._kind, self._folder = kind, settings.folder.absolute() / ".submitit"
        self._params = {name: value for name, value in launcher.items() if name not in ("_target_", "submitit_folder")}
        self._waiting: list[Sent] = []
        self._not_run = 0
        self._lost: ExecutorLost | None = None
        """Why Slurm takes no more jobs."""
        self.most_gpus = len(machine().gpus) if kind == "local" else None

    def start_no_more(self) -> None:
        """Drops the trials that wait. Jobs that Slurm has queued are cancelled."""
        super().start_no_more()
        self._waiting.clear()
        if self._kind == "slurm":
            for job in [job for job in self._running if job.state.upper() == "PENDING"]:
                del self._running[job]
                job.cancel(check=False)
                _remove_pickles(job)

    def _connect(self) -> None:
        import cloudpickle

        if self._kind == "slurm" and shutil.which("sbatch") is None:
            way_out = "Type it on a login node, or take hydra/launcher=wellfed."
            raise ConfigError.of("hydra/launcher=submitit_slurm", "there is no sbatch here.", way_out)
        for name in ("nodes", "tasks_per_node"):
            if self._params.get(name) not in (None, 1):
                problem, way_out = "a trial is one task on one machine.", f"Set hydra.launcher.{name}=1."
                raise ConfigError.of(f"hydra.launcher.{name}={self._params[name]}", problem, way_out)
        cloudpickle.register_pickle_by_value(trial_process)
        self._submitter(0)

    def _disconnect(self) -> None:
        for job in self._running:
            with suppress(OSError):
                job.cancel(check=False)
        end_s = time.monotonic() + _GRACE_S
        for job in self._running:
            while self._kind == "local" and not job.done() and time.monotonic() < end_s:
                time.sleep(0.05)
            _remove_pickles(job)

    def _has_begun(self) -> bool:
        return bool(self._waiting or self._running)

    def _has_room(self, trial: Trial | None) -> bool:
        return self._kind == "slurm" or not self._has_begun()

    def _submit(self, sent: Sent) -> None:
        self._waiting.append(sent)

    def _answers(self) -> list[tuple[Sent, ProcessAnswer]]:
        if self._waiting:
            self._hand_over()
        time.sleep(TICK_S)
        answers = []
        for job in [job for job in self._running if job.done()]:
            sent, answer = self._running.pop(job), _answer(job)
            if not answer.is_unfit:
                answers.append((sent, answer))
            elif self._is_open:
                self._not_run += 1
                self.settings.say(f"Not run: {answer.host}: {answer.problem}")
        return answers

    def _finish(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._not_run:
            raise ExecutorLost(f"{self._not_run} of the trials were not run.")

    def _hand_over(self) -> None:
        """Sends all trials that need as many GPUs as the first; what sbatch refuses is lost, and all that waits."""
        num_gpus = self._waiting[0].num_gpus
        taken = [each for each in self._waiting if each.num_gpus == num_gpus]
        self._waiting = [each for each in self._waiting if each.num_gpus != num_gpus]
        submitter = self._submitter(num_gpus)
        with _stderr_to(self._folder / "controllers.txt") if self._kind == "local" else nullcontext():
            try:
                orders = [each.order for each in taken]
                jobs = submitter.map_array(run_process, [self._process] * len(taken), orders)
            except RuntimeError as error:
                self._lost = ExecutorLost(f"Slurm takes no jobs: {first_line(error)}.")
                self._waiting.clear()
                if self._running:
                    self.settings.say(f"{self._lost} Those that it has go on.")
                return
            finally:
                for path in self._folder.glob("*.pkl"):  # belong to no job, and hold the configuration
                    path.unlink(missing_ok=True)
        self._running |= dict(zip(jobs, taken, strict=True))

    def _submitter(self, num_gpus: int) -> Any:
        """Returns submitit's executor for jobs with so many GPUs, unless the launcher's parameters name GPUs."""
        import submitit

        params = {name: value for name, value in self._params.items() if value not in (None, {}, [])}
        asks = {"gpus_per_node", "gpus_per_task", "gres"} & {*params, *params.get("additional_parameters", ())}
        if num_gpus and not asks:
            params["gpus_per_node"] = num_gpus
        key = "max_num_timeout"
        more = {f"{self._kind}_{key}": params.pop(key)} if key in params else {}
        named = {name if name in _SHARED else f"{self._kind}_{name}": value for name, value in params.items()}
        try:
            submitter = submitit.AutoExecutor(folder=self._folder / "%j", cluster=self._kind, **more)
            submitter.update_parameters(**named)
        except (ValueError, RuntimeError, NameError, AssertionError, TypeError) as error:
            problem, way_out = f"submitit refuses them: {first_line(error)}", "See --cfg hydra for all of them."
            raise ConfigError.of("hydra.launcher", problem, way_out) from error
        return submitter


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Redirects standard error of processes started meanwhile: submitit's watcher prints a traceback at Ctrl-C."""
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _answer(job: Any) -> ProcessAnswer:
    """Returns the answer of a job that has ended."""
    import submitit

    state = job.state
    try:
        answer: ProcessAnswer = job.result()
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        reason = next((line for line in reversed(str(error).splitlines()) if "Error: " in line), "")
        problem = f"its job has ended without a result (job {job.job_id}, {state})"
        return ProcessAnswer("", None, f"{problem}: {reason}" if reason else problem)
    finally:
        _remove_pickles(job)
    return answer


def _remove_pickles(job: Any) -> None:
    """Removes the files that hold the configuration as it is, with its secrets. What the job has printed stays."""
    for path in (job.paths.submitted_pickle, job.paths.result_pickle):
        with suppress(OSError):
            path.unlink()
