"""Prepares the trials on this machine: fork servers, plans of points.

The study's own process does not import torch. It names the functions of `trial_work`, which its fork servers import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.observe.machine_facts import MachineFacts
from wellfed.process import without_collections
from wellfed.study.executors.executor import PointPlan, StudySettings, Trial, TrialEnd
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job
from wellfed.study.executors.slots import visible
from wellfed.units import counted

Task = Callable[[Any, Connection], int]
"""Task of a `Job`: `call` with the name of a function of `trial_work` and its arguments."""
_MOST_SERVERS = 3
"""Fork servers that hold their data and model at one time."""


def shared_key(config: RunConfig) -> str:
    """Returns a text that is equal for configurations with the same data and model."""
    workload = config.workload
    has_optimizer = workload.optimizer is not None
    return json.dumps([workload.data, workload.model, has_optimizer, config.seed], sort_keys=True, default=str)


def import_trial_work() -> None:
    """Imports what a trial needs, PyTorch included."""
    with without_collections():
        from wellfed.study.executors import trial_work  # noqa: F401


def call(function: str, *arguments: Any, **more: Any) -> Any:
    """Calls a function of `trial_work` in a fork server or a process of it."""
    from wellfed.study.executors import trial_work

    return getattr(trial_work, function)(*arguments, **more)


class ForkServers:
    """One fork server for each data and model, started when first needed. The oldest ends if there are too many.

    The first server imports PyTorch itself unless the study has done so, which composes its points meanwhile. For a
    second one the study imports it, so that all others are forked with it.

    Args:
        prepare: makes data and model of a configuration.
        folder: has a file ``shared_<n>.log`` with what the n-th server prints.
        limit_s: time limit of making data and model.
        way_out: advice where that is over.
        imports: imports what ``prepare`` needs.
    """

    def __init__(
        self,
        prepare: Callable[[Composed[RunConfig]], Any],
        folder: Path,
        limit_s: float,
        way_out: str,
        imports: Callable[[], None] = import_trial_work,
    ) -> None:
        self._prepare, self._folder, self._limit_s, self._way_out = prepare, folder, limit_s, way_out
        self._imports = imports
        self._servers: dict[str, ForkServer] = {}
        self._numbers: dict[str, int] = {}

    def get(self, composed: Composed[RunConfig], busy: Iterable[ForkServer] = ()) -> ForkServer:
        """Returns the server of a configuration's data and model, ready or not. Servers that are ``busy`` stay."""
        shared = shared_key(composed.config)
        if shared not in self._servers:
            oldest = list(self._servers.values())[: max(0, len(self._servers) - _MOST_SERVERS + 1)]
            for server in oldest:
                if server not in busy:
                    self.drop(server)
            if self._numbers:
                self._imports()
            number = self._numbers.setdefault(shared, len(self._numbers) + 1)
            make = partial(self._prepare, composed)
            log = self._folder / f"shared_{number}.log"
            self._servers[shared] = ForkServer(make, log, self._limit_s, self._way_out, self._imports)
        return self._servers[shared]

    def ready(self, composed: Composed[RunConfig]) -> ForkServer:
        """Returns the server of a configuration's data and model when these are made.

        Raises:
            ForkServerFailed: they could not be made.
        """
        server = self.get(composed)
        try:
            server.wait_ready()
        except BaseException:
            self.drop(server)
            raise
        return server

    def drop(self, server: ForkServer) -> None:
        """Ends a server."""
        self._servers = {shared: each for shared, each in self._servers.items() if each is not server}
        server.close()

    def close(self) -> None:
        """Ends all servers and the trials that they run."""
        for server in list(self._servers.values()):
            self.drop(server)


class PointPlans:
    """Facts about this machine and about points that are known before their trials run.

    Attributes:
        machine: facts of this machine; None until a fork server has asked for them.
    """

    def __init__(self, settings: StudySettings, servers: ForkServers) -> None:
        self.machine: MachineFacts | None = None
        self._settings, self._servers = settings, servers
        self._plans: dict[str, PointPlan] = {}

    @property
    def gpus(self) -> list[str]:
        """GPUs as CUDA_VISIBLE_DEVICES names them."""
        return [] if self.machine is None else visible(os.environ, len(self.machine.training_gpus))

    def task(self, trial: Trial, composed: Composed[RunConfig]) -> Task:
        """Returns the task that runs a trial, with all that is known about its point."""
        if not trial.is_timed:
            return partial(call, "train_whole", composed=composed, may_be_pruned=trial.may_be_pruned)
        return partial(call, "run_timed", composed=composed, plan=self._plans.get(trial.row.point))

    def peak_gib(self, trial: Trial) -> float | None:
        """Returns the peak memory that the plan of a trial predicts."""
        plan = self._plans.get(trial.row.point)
        return None if plan is None else plan.predicted_peak_gib

    def refused(self, trials: Sequence[Trial]) -> Mapping[str, TrialEnd]:
        """Plans the points of timed trials that have no plan yet. Returns the ends of those that can't be run."""
        timed = [trial for trial in trials if trial.is_timed]
        configs = {trial.row.point: trial.composed for trial in timed if trial.row.point not in self._plans}
        groups: dict[str, list[str]] = {}
        for point, composed in configs.items():
            groups.setdefault(shared_key(composed.config), []).append(point)
        if len(configs) > 1:
            different = f" of {len(groups)} different data or models" if len(groups) > 1 else ""
            self._settings.say(f"Planning {counted(len(configs), 'point')}{different}")
        refused: dict[str, TrialEnd] = {}
        for points in groups.values():
            try:
                server = self._servers.ready(configs[points[0]])
            except ForkServerFailed as failed:
                refused |= dict.fromkeys(points, TrialEnd(not_started=failed.status, message=str(failed)))
                continue
            try:
                self._plan([(point, configs[point]) for point in points], server)
            except ForkServerFailed:  # killed from outside, mostly for want of memory: the rest is tried without a plan
                self._servers.drop(server)
        for point in {trial.row.point for trial in timed}:
            plan = self._plans.get(point)
            if plan is not None and plan.problem is not None:
                refused[point] = TrialEnd(not_started=plan.status, message=plan.problem)
        if self.machine is None and trials and not refused:
            try:
                self._plan([], self._servers.ready(trials[0].composed))
            except ForkServerFailed as failed:
                refused[trials[0].row.point] = TrialEnd(not_started=failed.status, message=str(failed))
        return refused

    def ask(self, composed: Composed[RunConfig], task: Task) -> list[Any]:
        """Returns the answers to a task with the data and model of a configuration, without the machine.

        Raises:
            ForkServerFailed: data and model could not be made.
        """
        return self._answers(self._servers.ready(composed), task)

    def _plan(self, points: Sequence[tuple[str, Composed[RunConfig]]], server: ForkServer) -> None:
        """Plans points in one process, or in several: a point that ends the process is left without a plan."""
        while True:
            plans = self._answers(server, partial(call, "plan_points", points=points))
            self._plans.update({plan.point: plan for plan in plans})
            points = points[len(plans) + 1 :]
            if not points:
                return

    def _answers(self, server: ForkServer, task: Task) -> list[Any]:
        """Returns the answers to a task that begin with the machine, which is noted and left out."""
        job = Job("ask", self._settings.scratch, task, limit_s=self._settings.prepare_s)
        seen, *answers = server.ask(job) or (None,)
        self.machine = self.machine or seen
        return answers
