"""Composes and plans points before any of them is run; what can't be run becomes a row."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.study.sweep.grid import GridPoint, point_id
from wellfed.study.trials.fork_server import ForkServer, ForkServerFailed, Job
from wellfed.study.trials.tasks import ComputeRows, PlanPoints, RunPoint, shared_key
from wellfed.study.trials.trial_ledger import TrialLedger, TrialScreen
from wellfed.study.trials.trial_pool import ForkServers, visible
from wellfed.units import counted

_MANY = 20
"""Points that take seconds to compose."""
_ROWS_S = 20
"""Feature rows that take longer are left to the trials."""


@dataclass
class TrialSetup:
    """What has to be there before trials can run; `scratch_folder` is for what they share."""

    compose_point: Callable[[Sequence[str], Path], Composed[RunConfig]]
    """The configuration of a point, by its overrides and its folder."""
    ledger: TrialLedger
    screen: TrialScreen
    scratch: Path
    timeout_s: float
    ready: dict[str, RunPoint] = field(default_factory=dict, init=False)
    """Points that compose and, once planned, fit; by id."""
    gpus: list[str] = field(default_factory=list, init=False)
    """As CUDA_VISIBLE_DEVICES names them."""
    _asked_for_rows: set[str] = field(default_factory=set, init=False)
    """What is shared by points whose feature rows were computed, or could not be."""

    def compose(self, points: Sequence[GridPoint]) -> None:
        """Each point's configuration, or its row.

        Raises:
            ConfigError: a fault that all points share: no axis can cure it.
        """
        if len(points) > _MANY:
            self.screen.say(f"Composing {counted(len(points), 'point')}")
        refused: list[tuple[GridPoint, ConfigError]] = []
        for point in points:
            try:
                composed = self.compose_point(point.overrides, self.ledger.folder / point.id)
            except ConfigError as error:
                refused.append((point, error))
            else:
                self.ready[point.id] = RunPoint(point, composed)
        if not self.ready and self.ledger.is_empty and len({refusal.faults for _, refusal in refused}) == 1:
            raise refused[0][1]
        for point, refusal in refused:
            self.ledger.refuse(point, "invalid", " ".join(map(str, refusal.faults)))

    def says_refused(self, size: int) -> bool:
        """Whether some of the grid's points can't be run; it is then said."""
        refused = size - len(self.ready)
        if refused:
            self.screen.say(f"sweep.fail_fast=true, and {counted(refused, 'point')} can't be run: none is started.")
        return refused > 0

    def plan(self, servers: ForkServers, points: Collection[str]) -> None:
        """Each of these points' plan, or its row."""
        groups: dict[str, list[str]] = {}
        for point in points:
            groups.setdefault(shared_key(self.ready[point].composed.config), []).append(point)
        if len(points) > 1:
            different = f" of {len(groups)} different data or models" if len(groups) > 1 else ""
            self.screen.say(f"Planning {counted(len(points), 'point')}{different}")
        for shared, members in groups.items():
            try:
                server = servers.get(shared, self.ready[members[0]].composed.config)
            except ForkServerFailed as failed:
                for point in members:
                    self.ledger.refuse(self.ready.pop(point).point, failed.status, str(failed))
                continue
            try:
                self._plan_with(server, members)
                self._share_rows(server, shared, members)
            except ForkServerFailed:  # killed from outside, for want of memory above all: what is left is simply tried
                servers.drop(server)

    def _plan_with(self, server: ForkServer, points: Sequence[str]) -> None:
        """In one process, or in several: a point that ends it is left without a plan."""
        while points:
            task = PlanPoints([(point, self.ready[point].composed) for point in points])
            seen, *plans = server.ask(Job("plan", self.scratch, task), self.timeout_s) or (None,)
            if seen is not None:
                self.gpus = visible(os.environ, seen.num_gpus)
                self.ledger.note_machine(seen.description, seen.processor)
            for plan in plans:
                ready = self.ready[plan.point]
                if plan.problem is None:
                    self.ready[plan.point] = replace(ready, plan=plan)
                else:
                    del self.ready[plan.point]
                    self.ledger.refuse(ready.point, "infeasible", plan.problem, plan.predicted_peak_gib)
            points = points[len(plans) + 1 :]

    def _share_rows(self, server: ForkServer, shared: str, points: Sequence[str]) -> None:
        """Feature rows, once for all trials that keep them; where they can't be had, each computes its own."""
        ready = [self.ready[point] for point in points if point in self.ready]
        keep = [each for each in ready if each.plan is not None and each.plan.keeps_rows]
        if not keep:
            return
        file = self.scratch / f"{point_id([shared])}.pt"
        if shared not in self._asked_for_rows:
            self._asked_for_rows.add(shared)  # first: the server may die of it
            server.ask(Job("rows", self.scratch, ComputeRows(file)), min(_ROWS_S, self.timeout_s))
        if file.exists():
            self.ready.update({each.point.id: replace(each, feature_rows=file) for each in keep})


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A folder that is gone at the end; what was left of it by one that was killed, too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
