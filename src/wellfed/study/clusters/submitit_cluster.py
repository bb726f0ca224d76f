"""Has orders done by jobs that submitit sends to Slurm, or starts on this machine; the only door to submitit.

Slurm queues the jobs itself, so all are sent at once; on this machine one is started when the one before has ended.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from wellfed.errors import ConfigError, first_line
from wellfed.study.clusters import keeper
from wellfed.study.clusters.cluster import ClusterLost, Ended, Order
from wellfed.study.clusters.keeper import OrderEnd, ProcessSettings, do_one

_TICK_S = 0.5
_GRACE_S = 10
_SHARED = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
    *("mem_gb", "nodes", "name", "stderr_to_stdout"),
)
"""Parameters that submitit knows for every kind of cluster; the others get its name before theirs."""
_ASKS_FOR_GPUS = ("gpus_per_node", "gpus_per_task", "gres")


class SubmititCluster:
    """Slurm, or this machine.

    Args:
        kind: of cluster.
        params: as ``hydra.launcher`` has them.
        folder: gets what jobs print, on a disk that all machines see.
        most_gpus: of this machine, for ``local``.
    """

    def __init__(
        self, kind: Literal["slurm", "local"], params: Mapping[str, Any], folder: Path, most_gpus: int | None
    ) -> None:
        self._kind, self._params, self._folder, self.most_gpus = kind, dict(params), folder, most_gpus
        self._waiting: deque[Order] = deque()
        self._running: list[tuple[Order, Any, float]] = []
        self._lost: ClusterLost | None = None
        """Slurm takes no more jobs; those that it has go on."""

    def open(self, settings: ProcessSettings, say: Callable[[str], None]) -> None:
        """As `Cluster.open`."""
        import cloudpickle

        self._settings, self._say = settings, say
        if self._kind == "slurm" and shutil.which("sbatch") is None:
            way_out = "Type it on a login node, or take hydra/launcher=wellfed."
            raise ConfigError.of("hydra/launcher=submitit_slurm", "there is no sbatch here.", way_out)
        for name in ("nodes", "tasks_per_node"):
            if self._params.get(name) not in (None, 1):
                problem, way_out = "a trial is one task on one machine.", f"Set hydra.launcher.{name}=1."
                raise ConfigError.of(f"hydra.launcher.{name}={self._params[name]}", problem, way_out)
        cloudpickle.register_pickle_by_value(keeper)
        self._executor(0)

    def run(self, orders: Sequence[Order], *, alone: bool) -> Iterator[Ended | None]:
        """As `Cluster.run`; jobs of Slurm run where it puts them."""
        self._waiting.extend(orders)
        while self._waiting or self._running:
            if self._waiting and not (self._kind == "local" and self._running):
                try:
                    self._submit()
                except ClusterLost as lost:
                    self._lost = lost
                    self._waiting.clear()
                    if self._running:
                        self._say(f"{lost} Those that it has go on.")
            yield None
            time.sleep(_TICK_S)
            for each in [each for each in self._running if each[1].done()]:
                self._running.remove(each)
                order, job, began_s = each
                yield Ended(order.key, _told(job), time.monotonic() - began_s)
        if self._lost is not None:
            raise self._lost

    def start_no_more(self) -> None:
        """As `Cluster.start_no_more`; jobs that Slurm has queued are taken back."""
        self._waiting.clear()
        if self._kind == "slurm":
            for each in [each for each in self._running if each[1].state.upper() == "PENDING"]:
                self._running.remove(each)
                each[1].cancel(check=False)

    def close(self) -> None:
        """As `Cluster.close`."""
        self._waiting.clear()
        for _, job, _ in self._running:
            with suppress(OSError):
                job.cancel(check=False)
        end_s = time.monotonic() + _GRACE_S
        for _, job, _ in self._running:
            while self._kind == "local" and not job.done() and time.monotonic() < end_s:
                time.sleep(0.05)
            _forget(job)
        self._running.clear()

    def _submit(self) -> None:
        """All that need what the first needs, or on this machine the first alone.

        Raises:
            ClusterLost: sbatch refuses them.
        """
        first = self._waiting[0].num_gpus
        alike = [order for order in self._waiting if order.num_gpus == first]
        taken = alike[:1] if self._kind == "local" else alike
        for order in taken:
            self._waiting.remove(order)
        contents = [order.content for order in taken]
        executor = self._executor(first)
        with _stderr_to(self._folder / "controllers.txt") if self._kind == "local" else nullcontext():
            try:
                jobs = executor.map_array(do_one, [self._settings] * len(taken), contents)
            except RuntimeError as error:
                raise ClusterLost(f"Slurm takes no jobs: {first_line(error)}.") from error
            finally:
                for path in self._folder.glob("*.pkl"):  # of no job, and the configuration is in it
                    path.unlink(missing_ok=True)
        self._running += [(order, job, time.monotonic()) for order, job in zip(taken, jobs, strict=True)]

    def _executor(self, num_gpus: int) -> Any:
        """For jobs that use so many GPUs, unless the launcher's own parameters say how many."""
        import submitit

        params = {name: value for name, value in self._params.items() if value not in (None, {}, [])}
        params.pop("submitit_folder", None)
        asks = any(name in params for name in _ASKS_FOR_GPUS) or "gres" in params.get("additional_parameters", {})
        if num_gpus and not asks:
            params["gpus_per_node"] = num_gpus
        timeouts = params.pop("max_num_timeout", None)
        named = {name if name in _SHARED else f"{self._kind}_{name}": value for name, value in params.items()}
        more = {} if timeouts is None else {f"{self._kind}_max_num_timeout": timeouts}
        try:
            executor = submitit.AutoExecutor(folder=self._folder / "%j", cluster=self._kind, **more)
            executor.update_parameters(**named)
        except (ValueError, RuntimeError, NameError, AssertionError, TypeError) as error:
            problem, way_out = f"submitit refuses them: {first_line(error)}", "See --cfg hydra for all of them."
            raise ConfigError.of("hydra.launcher", problem, way_out) from error
        return executor


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """For what is started meanwhile: the process that watches a job here ends a Ctrl-C with a traceback of its own."""
    kept, file = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)


def _told(job: Any) -> OrderEnd:
    """What a job that has ended has to tell."""
    import submitit

    state = job.state
    try:
        told: OrderEnd = job.result()
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        reason = next((line for line in reversed(str(error).splitlines()) if "Error: " in line), "")
        problem = f"its job has ended without a result (job {job.job_id}, {state})"
        return OrderEnd("", None, f"{problem}: {reason}" if reason else problem)
    finally:
        _forget(job)
    return told


def _forget(job: Any) -> None:
    """What was handed over holds the configuration as it is, secrets too; what the job has printed stays."""
    for path in (job.paths.submitted_pickle, job.paths.result_pickle):
        with suppress(OSError):
            path.unlink()
