"""Runs the trials of a sweep on other machines: ``hydra/launcher=ray``, ``submitit_slurm``, ``submitit_local``.

The points are composed here and planned where they run. Each row comes back by the cluster when its trial has ended and
is written at once, here alone; a file in the sweep's folder that goes with the sweep ends what has outlived it.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from wellfed.clusters.cluster import Cluster, ClusterLost, Order
from wellfed.clusters.keeper import OrderEnd
from wellfed.clusters.ray_cluster import RayCluster
from wellfed.clusters.submitit_cluster import SubmititCluster
from wellfed.config.schema import Accelerator, SweepConfig
from wellfed.hardware.detect import machine
from wellfed.stop_request import Stopped, StopRequest
from wellfed.sweep.ledger import Row
from wellfed.sweep.rows import ended_row, refused_row, started_at
from wellfed.trials.node_orders import Greeting, TrialOrder, process_settings, source_digest
from wellfed.trials.sweep_ledger import SweepLedger
from wellfed.trials.sweep_screen import SweepScreen
from wellfed.trials.tasks import RunPoint, is_for_cpu

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
        self._ready, self._ledger, self._screen, self._cluster = ready, ledger, screen, cluster
        self._config, self._stop = config, stop
        self._is_lost = False
        """No machine can do what is left."""

    @contextmanager
    def reached(self, alive: Path) -> Iterator[None]:
        """With the cluster at hand; ``alive`` is made, and goes with the sweep.

        Raises:
            ConfigError: it can't be reached.
        """
        folder = self._ledger.folder.absolute()
        greeting = Greeting(
            sweep=str(folder),
            alive=str(alive.absolute()),
            source=source_digest(),
            code=self._ledger.file.code,
            timeout_s=self._config.timeout_s,
            argv=(str(Path(sys.argv[0]).absolute()), *sys.argv[1:]),
        )
        self._cluster.open(process_settings(greeting), self._screen.say)
        try:
            alive.touch()
            yield
        finally:
            alive.unlink(missing_ok=True)
            self._cluster.close()

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
        begun: dict[str, tuple[Row, str | None]] = {}
        """What is known, and when the run in its folder began: that of an earlier attempt."""
        orders = []
        for point in points:
            ready = self._ready[point]
            row = replace(self._ledger.begin(ready.point, kind), host="", machine="")
            num_gpus = self._num_gpus(ready)
            if self._cluster.most_gpus is not None and num_gpus > self._cluster.most_gpus:
                most = self._cluster.most_gpus
                problem = f"trainer.devices={num_gpus}, and no machine there has more GPUs than {most}."
                self._ledger.refuse(ready.point, "infeasible", problem)
                continue
            begun[point] = row, started_at(self._ledger.folder / row.folder)
            hosts = self._ledger.hosts_like(point) if kind == "confirm" else None
            orders.append(Order(point, pickle.dumps(TrialOrder(ready, row)), num_gpus, hosts))
        all_well = True
        for point, told, seconds in self._ended(orders, alone=kind == "confirm"):
            if told.is_unfit:
                self._screen.say(f"Not run: {told.host}: {told.problem}")
                all_well = False
                continue
            row = _row(*begun[point], told, seconds, self._ledger.folder)
            self._ledger.add(row)
            if self._config.fail_fast and row.status != "ok":
                self._cluster.start_no_more()
                all_well = False
        return all_well and not self._is_lost

    def _num_gpus(self, ready: RunPoint) -> int:
        """That a trial is given; 0 where it shall train on the processor, or nobody knows of any."""
        config, most = ready.composed.config, self._cluster.most_gpus
        if is_for_cpu(ready.composed):
            return 0
        is_named = config.trainer.accelerator is Accelerator.gpu or config.gpu.memory_gib is not None
        return config.trainer.devices if (most is None and is_named) or most else 0

    def _ended(self, orders: Sequence[Order], *, alone: bool) -> Iterator[tuple[str, OrderEnd, float]]:
        """Each order that has ended, as long as nobody asks to stop and there are machines."""
        # The libraries wait in native code, where an exception of a signal's handler would be lost.
        self._stop.is_stepping = True
        try:
            for ended in self._cluster.run(orders, alone=alone):
                self._screen.tick()
                if ended is not None:
                    yield ended.key, ended.told, ended.seconds
                if self._stop.signum is not None:
                    raise Stopped(self._stop.signum)
        except ClusterLost as lost:
            self._is_lost = True
            self._screen.say(f"{lost} The same command again runs what is missing.")
        finally:
            self._stop.is_stepping = False


def _row(row: Row, before: str | None, told: OrderEnd, seconds: float, sweep: Path) -> Row:
    """What became of a trial; ``before``: when the run began that was in its folder when it was handed over."""
    if told.answer is not None:
        answered: Row = pickle.loads(told.answer)
        return answered
    row, folder = replace(row, host=told.host), sweep / row.folder
    if not folder.exists() or (before is not None and started_at(folder) == before):  # lost while it was prepared
        lost = replace(refused_row(row, "killed", ""), folder="", seconds=round(seconds, 3))
    else:
        lost = ended_row(row, sweep, -signal.SIGKILL, seconds, timed_out=False)
    advice = "sweep.retry=[killed] runs it again."
    return replace(lost, error={"kind": "code", "message": told.problem, "advice": advice})
