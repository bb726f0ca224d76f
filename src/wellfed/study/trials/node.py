"""Runs trials on a machine of a cluster: the process that its keeper starts there, and what the two say to each other.

What is shared is prepared once for all trials that come here, and each is planned and run in forks of its own, as on
the sweep's own machine: the same servers, places, timeouts and rows. The row of a trial is made here, where its files
are: another machine may see them later.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import wellfed.process
from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.process import MAY_FORK, die_with_parent
from wellfed.record import engine_state
from wellfed.run.folder.lock import FILE_NAME as LOCK
from wellfed.run.folder.lock import only_one
from wellfed.run.train import own_git_state
from wellfed.study.clusters.keeper import read_frame, write_frame
from wellfed.study.search.search_rows import SearchRow
from wellfed.study.sweep.ledger import Row
from wellfed.study.sweep.rows import code_version, refused_row
from wellfed.study.trials.fork_server import ForkServer, ForkServerFailed, Job
from wellfed.study.trials.node_orders import Greeting, TrialOrder
from wellfed.study.trials.sweep import prepare_to_fork
from wellfed.study.trials.tasks import PlanPoints, PointPlan, RunPoint, shared_key
from wellfed.study.trials.trial_execution import open_trial_folder, queued, row_of
from wellfed.study.trials.trial_pool import FinishedTrial, ForkServers, QueuedTrial, Slots, TrialPool, visible
from wellfed.study.trials.whole_trainings import row_of_training, whole_training

_SEEN_WITHIN_S = 15
"""A file that was just written is seen on another machine, unless the folder is another one there."""
_ALIVE_EVERY_S = 3
_FREE_WITHIN_S = 60


def main() -> None:
    """All of such a process's life: standard input brings orders, standard output takes rows."""
    die_with_parent(os.getppid())
    with contextlib.suppress(OSError):  # Ray starts its workers with a low one; not everybody may raise it again
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    rows = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed goes where its keeper looks for a last word
    orders = sys.stdin.buffer
    greeting = Greeting(**json.loads(read_frame(orders)))
    os.environ[project.VARIABLE] = greeting.project
    sys.argv = list(greeting.argv)
    write_frame(rows, _problem(greeting).encode())
    with _trials_here(greeting) as run:
        while True:
            try:
                content = read_frame(orders)
            except EOFError:  # nobody wants more
                return
            write_frame(rows, pickle.dumps(run(pickle.loads(content))))


def _problem(greeting: Greeting) -> str:
    """What keeps this machine from running trials of that sweep; empty where nothing does."""
    if not MAY_FORK:
        return "trials are forked, which its system does not offer."
    if (source := project.source_digest()) != greeting.source:
        here, there = code_version(own_git_state(), engine_state()), greeting.code
        versions = "with changes of its own" if here == there else f"{here}, and the sweep has {there}"
        return (
            f"it has other code ({project.root()}: {versions}; digest {source}, not {greeting.source}). "
            "Bring it to the same, or share the folder of the project."
        )
    end_s = time.monotonic() + _SEEN_WITHIN_S
    while not Path(greeting.alive).exists():
        if time.monotonic() > end_s:
            return f"it does not see the sweep's folder {greeting.sweep}. Put paths.log_dir on a disk that all share."
        time.sleep(0.5)
    if not os.access(greeting.sweep, os.W_OK):
        return f"it can't write to the sweep's folder {greeting.sweep}. Give it the right to, or mount it for writing."
    return ""


class _SweepIsOverError(Exception):
    """Nobody waits for the row any more."""


@contextmanager
def _trials_here(greeting: Greeting) -> Iterator[Callable[[TrialOrder], Row]]:
    """What runs one, as long as the context lasts."""
    name = f"{socket.gethostname()}_{os.getpid()}"

    def log(number: int) -> Path:
        return Path(greeting.sweep) / f"shared_{name}_{number}.log"

    def prepare(config: Any) -> Any:
        from wellfed.study.trials import trial

        return trial.prepare(config)

    def work(shared: Any, task: Any) -> Any:
        from wellfed.study.trials import trial

        return trial.work(shared, task)

    way_out = f"Raise {greeting.group}.timeout_s, with {greeting.group}.retry=[timeout]."
    with (
        tempfile.TemporaryDirectory(prefix="wellfed-node-") as scratch,
        closing(ForkServers(prepare, work, log, greeting.prepare_s, way_out)) as servers,
    ):
        try:
            yield _NodeTrials(greeting, Path(scratch), servers).run
        finally:
            for path in Path(greeting.sweep).glob(f"shared_{name}_*.log"):
                if not path.stat().st_size:
                    path.unlink()


class _NodeTrials:
    """Plans and runs one trial after the other."""

    def __init__(self, greeting: Greeting, scratch: Path, servers: ForkServers) -> None:
        self._greeting, self._scratch, self._servers = greeting, scratch, servers
        self._plans: dict[str, PointPlan] = {}
        """Of points that were here before."""
        self._gpus: list[str] = []
        self._processor = ""
        self._looked_s = 0.0

    def run(self, order: TrialOrder) -> Row:
        """Its row, whatever becomes of it."""
        folder, point = Path(self._greeting.sweep), order.point
        row = replace(order.row, host=socket.gethostname())
        config = point.composed.config
        prepare_to_fork(RunConfig())  # what the trial's own asks for is set in its fork: this process stays for others
        import wellfed.study.trials.trial  # noqa: F401  what all processes forked from here need

        try:
            server = self._servers.get(shared_key(config), config)
        except ForkServerFailed as failed:
            return replace(refused_row(row, failed.status, str(failed)), folder="")
        if order.search is not None:
            return self._trained(order, row, server)
        plan = self._planned(server, point)
        if plan is not None and plan.problem is not None:
            refused = refused_row(row, "infeasible", plan.problem)
            return replace(refused, folder="", predicted_peak_gib=plan.predicted_peak_gib)
        row, trial = queued(replace(point, plan=plan), replace(row, machine=self._processor), folder)
        return row_of(self._finished(trial), row, folder)

    def _trained(self, order: TrialOrder, row: Row, server: ForkServer) -> Row:
        """The row of a whole training, which plans itself."""
        assert order.search is not None
        assert isinstance(row, SearchRow)
        if not self._processor:
            self._plans_of(server, [])
        folder, point = Path(self._greeting.sweep), order.point
        trial = whole_training(point.point.id, point.composed, folder, self._gpus)
        row = replace(row, machine=self._processor)
        return row_of_training(self._finished(trial), row, folder, order.search)

    def _finished(self, trial: QueuedTrial) -> FinishedTrial:
        pool = TrialPool(
            self._servers,
            Slots(self._gpus, wellfed.process.CPUS_AT_START),
            self._greeting.timeout_s,
            partial(open_when_free, check=self._check_alive),
            self._tick,
        )
        (finished,) = pool.run([trial])
        return finished

    def _planned(self, server: ForkServer, point: RunPoint) -> PointPlan | None:
        """None: planning ended its process; the trial is simply tried."""
        if point.point.id not in self._plans:
            for plan in self._plans_of(server, [(point.point.id, point.composed)]):
                self._plans[plan.point] = plan
        return self._plans.get(point.point.id)

    def _plans_of(self, server: ForkServer, points: Sequence[tuple[str, Composed[RunConfig]]]) -> Sequence[PointPlan]:
        """As far as they could be made; what the machine has is noted."""
        try:
            answers = server.ask(Job("plan", self._scratch, PlanPoints(points)), self._greeting.prepare_s)
        except ForkServerFailed:  # killed from outside: it is made anew for the trial
            self._servers.drop(server)
            return ()
        seen, *plans = answers or (None,)
        if seen is not None:
            self._gpus, self._processor = visible(os.environ, seen.num_gpus), seen.processor
        return plans

    def _tick(self) -> None:
        if time.monotonic() - self._looked_s >= _ALIVE_EVERY_S:
            self._check_alive()

    def _check_alive(self) -> None:
        self._looked_s = time.monotonic()
        if not Path(self._greeting.alive).exists():
            raise _SweepIsOverError


def open_when_free(folder: Path, check: Callable[[], None]) -> None:
    """As `open_trial_folder`; a job of a sweep that was killed may still write there, for a moment.

    Args:
        check: raises where this is such a job itself: what is there then is another sweep's.
    """
    end_s = time.monotonic() + _FREE_WITHIN_S
    while (folder / LOCK).exists() and time.monotonic() < end_s:
        try:
            with only_one(folder):
                break
        except ConfigError:
            time.sleep(0.5)
    check()
    open_trial_folder(folder)
