"""Runs trials on other machines: ``hydra/launcher=ray``, ``submitit_slurm``, ``submitit_local``.

The points are composed here and planned where they run. Each row comes back by the cluster when its trial has ended and
is written at once, here alone; a file in the folder of the sweep or the search, which goes with it, ends what has
outlived it.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig, SweepConfig
from wellfed.observe.hardware.detect import machine
from wellfed.process import Stopped, StopRequest
from wellfed.study.clusters.cluster import Cluster, ClusterLost, Order
from wellfed.study.clusters.keeper import OrderEnd
from wellfed.study.clusters.ray_cluster import RayCluster
from wellfed.study.clusters.submitit_cluster import SubmititCluster
from wellfed.study.sweep.ledger import Row
from wellfed.study.sweep.rows import ended_row, refused_row, started_at
from wellfed.study.trials.node_orders import Greeting, TrialOrder, process_settings
from wellfed.study.trials.sweep_ledger import SweepLedger
from wellfed.study.trials.sweep_screen import SweepScreen
from wellfed.study.trials.tasks import RunPoint, is_for_cpu

_RAY = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
_SUBMITIT: Mapping[str, Literal["slurm", "local"]] = {
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher": "slurm",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher": "local",
}


def cluster_of(launcher: Mapping[str, Any], sweep: Path) -> Cluster | None:
    """What a launcher's configuration (``hydra.launcher``) stands for; None where it is not one of these."""
    target = str(launcher.get("_target_", ""))
    if target == _RAY:
        return RayCluster(launcher["ray"]["init"], launcher["ray"]["remote"])
    if target not in _SUBMITIT:
        return None
    kind = _SUBMITIT[target]
    params = {name: value for name, value in launcher.items() if name != "_target_"}
    most_gpus = len(machine().gpus) if kind == "local" else None
    return SubmititCluster(kind, params, sweep.absolute() / ".submitit", most_gpus)


@dataclass
class TrialsElsewhere:
    """Hands trials to a cluster and takes their rows."""

    cluster: Cluster
    folder: Path
    """Of the sweep or the search."""
    stop: StopRequest
    say: Callable[[str], None]
    tick: Callable[[], None]
    """Called a few times a second."""
    group: str = "sweep"
    """Has the knobs that advice names."""
    is_lost: bool = field(default=False, init=False)
    """No machine can do what is left."""

    @contextmanager
    def reached(self, alive: Path, code: str, timeout_s: float, prepare_s: float) -> Iterator[None]:
        """With the cluster at hand; ``alive`` is made, and goes with the sweep or the search.

        Raises:
            ConfigError: it can't be reached.
        """
        greeting = Greeting(
            sweep=str(self.folder.absolute()),
            alive=str(alive.absolute()),
            project=str(project.root()),
            source=project.source_digest(),
            code=code,
            timeout_s=timeout_s,
            prepare_s=prepare_s,
            group=self.group,
            argv=(str(Path(sys.argv[0]).absolute()), *sys.argv[1:]),
        )
        self.cluster.open(process_settings(greeting), self.say)
        try:
            alive.touch()
            yield
        finally:
            alive.unlink(missing_ok=True)
            self.cluster.close()

    def misfit(self, composed: Composed[RunConfig]) -> str | None:
        """Why no machine there can run a trial; None = nothing is known against it."""
        num_gpus, most = self._num_gpus(composed), self.cluster.most_gpus
        if most is None or num_gpus <= most:
            return None
        return f"trainer.devices={num_gpus}, and no machine there has more GPUs than {most}."

    def run(
        self, trials: Sequence[TrialOrder], hosts: Mapping[str, frozenset[str] | None] | None = None
    ) -> Iterator[tuple[TrialOrder, Row | None]]:
        """Each with its row when it has ended; None where its machine turned out to be unfit.

        Args:
            hosts: machines that may run a point; with it one at a time on a machine.
        """
        by_point = {trial.point.point.id: trial for trial in trials}
        # The run that is in a trial's folder by now is that of an earlier attempt.
        before = {point: started_at(self.folder / trial.row.folder) for point, trial in by_point.items()}
        orders = [
            Order(point, pickle.dumps(trial), self._num_gpus(trial.point.composed), (hosts or {}).get(point))
            for point, trial in by_point.items()
        ]
        for point, told, seconds in self._ended(orders, alone=hosts is not None):
            trial = by_point[point]
            if told.is_unfit:
                self.say(f"Not run: {told.host}: {told.problem}")
                yield trial, None
            else:
                yield trial, row_of_order(trial.row, before[point], told, seconds, self.folder, self.group)

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """That a trial is given; 0 where it shall train on the processor, or nobody knows of any."""
        config, most = composed.config, self.cluster.most_gpus
        if is_for_cpu(composed):
            return 0
        is_named = config.trainer.accelerator is Accelerator.gpu or config.gpu.memory_gib is not None
        return config.trainer.devices if (most is None and is_named) or most else 0

    def _ended(self, orders: Sequence[Order], *, alone: bool) -> Iterator[tuple[str, OrderEnd, float]]:
        """Each order that has ended, as long as nobody asks to stop and there are machines."""
        # The libraries wait in native code, where an exception of a signal's handler would be lost.
        self.stop.is_stepping = True
        try:
            for ended in self.cluster.run(orders, alone=alone):
                self.tick()
                if ended is not None:
                    yield ended.key, ended.told, ended.seconds
                if self.stop.signum is not None:
                    raise Stopped(self.stop.signum)
        except ClusterLost as lost:
            self.is_lost = True
            self.say(f"{lost} The same command again runs what is missing.")
        finally:
            self.stop.is_stepping = False


class SweepElsewhere:
    """Hands what is ready to a cluster, and gives each end to the ledger."""

    def __init__(
        self,
        ready: Mapping[str, RunPoint],
        ledger: SweepLedger,
        screen: SweepScreen,
        cluster: Cluster,
        config: SweepConfig,
        stop: StopRequest,
    ) -> None:
        self._ready, self._ledger, self._screen, self._config = ready, ledger, screen, config
        self._trials = TrialsElsewhere(cluster, ledger.folder, stop, screen.say, screen.tick)

    @contextmanager
    def reached(self, alive: Path) -> Iterator[None]:
        """As `TrialsElsewhere.reached`."""
        limit_s = self._config.timeout_s
        with self._trials.reached(alive, self._ledger.file.code, limit_s, limit_s):
            yield

    def run_missing(self) -> bool:
        """False: stopped at the first that did not end well, or no machine is left."""
        missing = self._ledger.missing(self._ready)
        self._screen.begin(len(missing), self._ledger.best())
        return self._run(missing, "trial")

    def confirm(self) -> None:
        """The best again, a round after the other, one at a time on a machine; where they were measured, or on machines
        of the same kind."""
        again = self._ledger.to_confirm(self._ready)
        self._screen.begin(len(again), self._ledger.best(), "Measuring the best again, in turn")
        number = len(set(again))
        for first in range(0, len(again), number or 1):
            if not self._run(again[first : first + number], "confirm"):
                return

    def _run(self, points: Sequence[str], kind: Literal["trial", "confirm"]) -> bool:
        trials = []
        for point in points:
            ready = self._ready[point]
            row = replace(self._ledger.begin(ready.point, kind), host="", machine="")
            if (problem := self._trials.misfit(ready.composed)) is not None:
                self._ledger.refuse(ready.point, "infeasible", problem)
            else:
                trials.append(TrialOrder(ready, row))
        hosts = {point: self._ledger.hosts_like(point) for point in points} if kind == "confirm" else None
        all_well = True
        for _, ended in self._trials.run(trials, hosts):
            if ended is None:
                all_well = False
                continue
            self._ledger.add(ended)
            if self._config.fail_fast and ended.status != "ok":
                self._trials.cluster.start_no_more()
                all_well = False
        return all_well and not self._trials.is_lost


def row_of_order(row: Row, before: str | None, told: OrderEnd, seconds: float, folder: Path, group: str) -> Row:
    """What became of a trial; ``before``: when the run began that was in its folder when it was handed over."""
    if told.answer is not None:
        answered: Row = pickle.loads(told.answer)
        return answered
    row, own = replace(row, host=told.host), folder / row.folder
    if not own.exists() or (before is not None and started_at(own) == before):  # lost while it was prepared
        lost = replace(refused_row(row, "killed", ""), folder="", seconds=round(seconds, 3))
    else:
        lost = ended_row(row, folder, -signal.SIGKILL, seconds, timed_out=False, group=group)
    advice = f"{group}.retry=[killed] runs it again."
    return replace(lost, error={"kind": "code", "message": told.problem, "advice": advice})
