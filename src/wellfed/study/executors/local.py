"""Runs trials on this machine, one a GPU at a time, in processes forked from one that has made data and model."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import wellfed.process
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.run.train import set_environment
from wellfed.study.executors.executor import StudySettings, Trial, TrialEnd
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, JobEnd
from wellfed.study.executors.pool import FinishedTrial, ForkServers, QueuedTrial, Slots, TrialPool, visible
from wellfed.study.executors.tasks import (
    ComputeRows,
    MachineSeen,
    PlanPoints,
    PointPlan,
    RunTimed,
    TrainWhole,
    Validated,
    is_for_cpu,
    shared_key,
)
from wellfed.study.points.grid import point_id
from wellfed.study.row import Row
from wellfed.units import counted

_ROWS_S = 20
"""Time limit of computing feature rows for all trials. After it each trial computes its own."""


class LocalExecutor:
    """An executor on this machine.

    Args:
        settings: settings of the study.
        open_folder: makes the folder of a trial.
        log: returns the file that gets what the n-th fork server prints.

    Attributes:
        machine: this machine as trials see it; None until a fork server has looked.
    """

    def __init__(
        self,
        settings: StudySettings,
        open_folder: Callable[[Path], None] | None = None,
        log: Callable[[int], Path] | None = None,
    ) -> None:
        self.machine: MachineSeen | None = None
        self.settings = settings
        self._open_folder = open_folder or open_trial_folder
        self._log = log or (lambda number: settings.folder / f"shared_{number}.log")
        self._plans: dict[str, PointPlan] = {}
        self._rows: dict[str, Path | None] = {}
        """Feature rows by `shared_key`; None where they could not be computed."""
        self._pool: TrialPool | None = None
        self._is_open = True

    def __enter__(self) -> Self:
        with wellfed.process.without_collections():
            from wellfed.study.executors import trial_work

        group = self.settings.group
        way_out = f"Raise {group}.timeout_s, with {group}.retry=[timeout]."
        self._servers = ForkServers(trial_work.prepare, trial_work.work, self._log, self.settings.prepare_s, way_out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._servers.close()

    @property
    def gpus(self) -> list[str]:
        """GPUs as CUDA_VISIBLE_DEVICES names them."""
        return [] if self.machine is None else visible(os.environ, self.machine.num_gpus)

    def num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial gets; 0 = it trains on the processor."""
        return 0 if is_for_cpu(composed) else min(composed.config.trainer.devices, len(self.gpus))

    def ask(self, config: RunConfig, task: Any) -> tuple[Any, ...]:
        """Returns the answers of a task to the data and model of a configuration, without the `MachineSeen`.

        Raises:
            ForkServerFailed: data and model could not be made.
        """
        return self._answers(self._servers.get(shared_key(config), config), task)

    def run(
        self,
        trials: Sequence[Trial] = (),
        more: Callable[[], Trial | None] | None = None,
        *,
        alone: bool = False,
        prune: Callable[[Trial, int, float], str | None] | None = None,
    ) -> Iterator[tuple[Trial, Row]]:
        """Runs trials as `Executor.run` says."""
        self._is_open = True
        refused = dict(self._planned([trial for trial in trials if trial.is_timed]))
        if self.machine is None and trials and not refused:
            refused |= self._looked(trials[0])
        for trial in trials:
            if (end := refused.get(trial.row.point)) is not None:
                yield trial, self._row(trial, end)
        left = [trial for trial in trials if trial.row.point not in refused]
        if not self._is_open:
            return
        known = {trial.key: trial for trial in left}

        def propose() -> QueuedTrial | None:
            trial = None if more is None else more()
            if trial is None:
                return None
            known[trial.key] = trial
            return self._queued(trial)

        def said(queued: QueuedTrial, what: Validated) -> str | None:
            return None if prune is None else prune(known[queued.key], what.number, what.value)

        for together in [[trial] for trial in left] if alone else [left]:
            if self._is_open:
                settings, slots = self.settings, Slots(self.gpus, wellfed.process.CPUS_AT_START)
                self._pool = TrialPool(self._servers, slots, settings.timeout_s, self._open_folder, settings.tick, said)
                for finished in self._pool.run([self._queued(trial) for trial in together], propose):
                    trial = known.pop(finished.trial.key)
                    yield trial, self._row(trial, self._end(finished))

    def start_no_more(self) -> None:
        """Drops the trials that wait."""
        self._is_open = False
        if self._pool is not None:
            self._pool.start_no_more()

    def _queued(self, trial: Trial) -> QueuedTrial:
        """Returns a trial as the pool takes it."""
        folder, config = self.settings.folder / trial.row.folder, trial.composed.config
        composed = replace(trial.composed, run_dir=folder)
        plan, shared = self._plans.get(trial.row.point), shared_key(config)
        rows = self._rows.get(shared) if plan is not None and plan.keeps_rows else None
        task = RunTimed(composed, plan, rows) if trial.is_timed else TrainWhole(composed)
        return QueuedTrial(trial.key, shared, config, task, folder, self.num_gpus(composed), trial.may_be_pruned)

    def _end(self, finished: FinishedTrial) -> TrialEnd:
        if isinstance(end := finished.end, JobEnd):
            return TrialEnd(code=end.code, seconds=end.seconds, is_timeout=finished.timed_out)
        return TrialEnd(not_started=end.status, message=str(end))

    def _row(self, trial: Trial, end: TrialEnd) -> Row:
        plan = self._plans.get(trial.row.point)
        peak = None if plan is None else plan.predicted_peak_gib
        processor = "" if self.machine is None else self.machine.processor
        end = replace(end, host=socket.gethostname(), machine=processor, predicted_peak_gib=peak)
        return self.settings.row_of(trial.row, end, self.settings.folder)

    # -- planning ---------------------------------------------------------------------------------------------------

    def _planned(self, trials: Sequence[Trial]) -> Mapping[str, TrialEnd]:
        """Plans the points of trials that have no plan yet. Returns the ends of those that can't be run, by point."""
        configs = {trial.row.point: trial.composed for trial in trials if trial.row.point not in self._plans}
        groups: dict[str, list[str]] = {}
        for point, composed in configs.items():
            groups.setdefault(shared_key(composed.config), []).append(point)
        if len(configs) > 1:
            different = f" of {len(groups)} different data or models" if len(groups) > 1 else ""
            self.settings.say(f"Planning {counted(len(configs), 'point')}{different}")
        refused: dict[str, TrialEnd] = {}
        for shared, points in groups.items():
            try:
                server = self._servers.get(shared, configs[points[0]].config)
            except ForkServerFailed as failed:
                refused |= dict.fromkeys(points, TrialEnd(not_started=failed.status, message=str(failed)))
                continue
            try:
                self._plan_with(server, {point: configs[point] for point in points})
                self._share_rows(server, shared, points)
            except ForkServerFailed:  # killed from outside, mostly for want of memory: the rest is tried without a plan
                self._servers.drop(server)
        for point in {trial.row.point for trial in trials}:
            plan = self._plans.get(point)
            if plan is not None and plan.problem is not None:
                refused[point] = TrialEnd(not_started="infeasible", message=plan.problem)
        return refused

    def _looked(self, trial: Trial) -> Mapping[str, TrialEnd]:
        """Looks at the machine. Returns the end of that trial if its data and model can't be made."""
        try:
            self.ask(trial.composed.config, PlanPoints([]))
        except ForkServerFailed as failed:
            return {trial.row.point: TrialEnd(not_started=failed.status, message=str(failed))}
        return {}

    def _plan_with(self, server: ForkServer, configs: Mapping[str, Composed[RunConfig]]) -> None:
        """Plans points in one process, or in several: a point that ends the process is left without a plan."""
        points = list(configs)
        while points:
            plans = self._answers(server, PlanPoints([(point, configs[point]) for point in points]))
            self._plans.update({plan.point: plan for plan in plans})
            points = points[len(plans) + 1 :]

    def _share_rows(self, server: ForkServer, shared: str, points: Sequence[str]) -> None:
        """Computes feature rows once for all trials that keep them, if that can be done in time."""
        plans = [self._plans[point] for point in points if point in self._plans]
        if shared in self._rows or not any(plan.keeps_rows and plan.problem is None for plan in plans):
            return
        self._rows[shared] = None  # first: the server may die of it
        file = self.settings.scratch / f"{point_id([shared])}.pt"
        server.ask(Job("rows", self.settings.scratch, ComputeRows(file)), min(_ROWS_S, self.settings.prepare_s))
        self._rows[shared] = file if file.exists() else None

    def _answers(self, server: ForkServer, task: Any) -> tuple[Any, ...]:
        """Returns the answers to a task that begin with the machine, which is noted and left out."""
        seen, *answers = server.ask(Job("ask", self.settings.scratch, task), self.settings.prepare_s) or (None,)
        if seen is not None and self.machine is None:
            self.machine = seen
            self.settings.see_machine(seen)
        return tuple(answers)


def prepare_to_fork(config: RunConfig) -> None:
    """Sets the environment before torch is imported: settings that torch reads then, and that asking whether there is
    a GPU must not start CUDA."""
    set_environment(os.environ, config)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available's documentation


def open_trial_folder(folder: Path) -> None:
    """Makes the folder of a trial. One of an earlier attempt is kept beside it."""
    if folder.exists():
        asides = (folder.with_name(f"{folder.name}.attempt{number}") for number in count(1))
        folder.rename(next(aside for aside in asides if not aside.exists()))
    folder.mkdir()
