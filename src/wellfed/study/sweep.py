"""Runs ``python src/train.py -m sweep=<option>``: every combination a timed trial, the best again, then the ranks.

All points are composed and planned before the first is run.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property

from wellfed.command_line import announce
from wellfed.config.multirun import Multirun
from wellfed.errors import ConfigError
from wellfed.observe.loggers import wandb_sink
from wellfed.study.board.publish import publish
from wellfed.study.executors.executor import Executor, Launch
from wellfed.study.executors.launchers import executor_of
from wellfed.study.executors.local import prepare_to_fork
from wellfed.study.objective import OBJECTIVES
from wellfed.study.points.grid import GridPoint, baselines_of
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.request import study_request
from wellfed.study.rows import Kept
from wellfed.study.study import MultirunStudy, StudyScreen, Trials, scratch_folder
from wellfed.study.study_files import SweepFile
from wellfed.study.trial_end import TrialKind
from wellfed.units import counted


def run_sweep(multirun: Multirun, launch: Launch | None = None) -> int:
    """Runs a sweep; returns 0 if any trial is ok. ``launch`` is as `MultirunStudy` has it.

    Raises:
        ConfigError: no sweep can be made of this; nothing was run.
    """
    base = multirun.base()
    asked = study_request("sweep", multirun, base, launch)
    objective = OBJECTIVES[base.config.sweep.objective.value]
    screen = StudyScreen(objective, list(asked.space), base.config.workload.sample_unit)
    return SweepStudy(asked.folder, screen, multirun, base.config, asked, launch).go()


@dataclass
class SweepStudy(MultirunStudy):
    """One command of a sweep."""

    goes_on = "again runs what is missing."
    _has_measured: bool = field(default=False, init=False)
    """Whether this command ran trials, and any of all has a rank."""

    @cached_property
    def points(self) -> list[GridPoint]:
        """All points of the grid."""
        return self.asked.grid.points()

    @cached_property
    def file(self) -> SweepFile:
        """Facts that the trials share."""
        options = self.config.sweep
        return SweepFile(
            **self.facts,
            sample_unit=self.config.workload.sample_unit,
            space=self.asked.space,
            ids=tuple(point.id for point in self.points),
            trial_steps=options.trial_steps,
            objective=options.objective.value,
        )

    def run(self) -> None:
        """Runs what is missing, then the best again in turns."""
        options, file = self.config.sweep, self.file
        earlier = self.read_earlier(SweepFile)
        was = "" if earlier is None else earlier.code  # an earlier command ran what it left without its end
        kept = Kept(self.folder, file.ranked_by, file.code, options.retry, file.ids, adopted_code=was)
        self.trials = trials = Trials(kept, self.screen, self.multirun.compose)
        if earlier is not None:
            self._report_earlier(trials, earlier)
        prepare_to_fork(self.config)
        with scratch_folder(self.folder / ".scratch") as scratch, ExitStack() as entered:
            settings = self.settings(scratch, options.timeout_s)
            executor = executor_of(self.launch, settings)
            if self.launch is None:  # it prepares while the points are composed
                entered.enter_context(executor)
            self.compose(trials, executor)
            if not (kept.missing(trials.ready) or self._to_confirm(trials)):
                return
            if not kept.missing(trials.ready):
                self._announce()
            if self.launch is None and self._publishes:  # a local executor still prepares
                with suppress(Exception):  # `publish` reports what is wrong with it
                    wandb_sink.import_wandb()
            self.file.write(self.folder)
            self.measure(trials, executor)
            self._has_measured = trials.kept.best() is not None

    def compose(self, trials: Trials, executor: Executor) -> None:
        """Composes each point's configuration, or writes a row with the reason why that is impossible.

        The executor begins to prepare the first point that is to be run.

        Raises:
            ConfigError: all points share one fault, which no axis can cure.
        """
        refused: list[tuple[GridPoint, ConfigError]] = []
        is_expected = False
        for point in self.points:
            if (error := trials.compose(point)) is not None:
                refused.append((point, error))
            elif not is_expected and trials.kept.missing([point.id]):
                is_expected = True
                self._announce()
                executor.expect(trials.ready[point.id][1], is_one=self.asked.shares_model)
        is_new = not trials.kept.found.rows
        if is_new and not trials.ready and len({error.faults for _, error in refused}) == 1:
            raise refused[0][1]
        for point, error in refused:
            trials.refuse(point, error)

    def _announce(self) -> None:
        points = counted(len(self.points), "point")
        announce(f"Sweep of {points}: importing PyTorch, reading data, building the model")

    def _to_confirm(self, trials: Trials) -> list[str]:
        baselines = baselines_of({point.id: point.values for point in self.points})
        return trials.kept.to_confirm(trials.ready, baselines)

    def measure(self, trials: Trials, executor: Executor) -> None:
        """Runs what is missing, then the best again in turns."""
        kept, options = trials.kept, self.config.sweep
        if options.fail_fast and (refused := len(self.points) - len(trials.ready)):
            self.screen.say(f"sweep.fail_fast=true, and {counted(refused, 'point')} can't be run: none is started.")
            return
        missing = kept.missing(trials.ready)
        self.screen.begin(len(missing), f"Trials: {len(missing)}, in {self.folder}")
        if not self._run(trials, executor, missing, "trial"):
            return
        again = self._to_confirm(trials)
        number = len(set(again))
        title = f"Measuring the best again, in turn: {len(again)}, in {self.folder}"
        self.screen.begin(len(again), title)
        for first in range(0, len(again), number or 1):
            if not self._run(trials, executor, again[first : first + number], "confirm"):
                return

    def _run(self, trials: Trials, executor: Executor, points: list[str], kind: TrialKind) -> bool:
        """Runs these points; returns False if the sweep is to stop here."""
        all_well = True
        left = [trials.trial(point, kind) for point in points if point in trials.ready]  # planning may refuse some
        for _, row in trials.run(executor, left):
            if self.config.sweep.fail_fast and row.status != "ok":
                executor.start_no_more()
                all_well = False
        return all_well and not trials.is_lost

    def _report_earlier(self, trials: Trials, earlier: SweepFile) -> None:
        """Reports that rows are kept, and what about them differs from now."""
        now, before = set(self.file.ids), set(earlier.ids)
        progress = f"{len(trials.kept.latest)} of {len(now)} points have a row."
        if now != before:
            progress += f" The grid has changed: {len(now - before)} points are new, {len(before - now)} are left out."
        if earlier.trial_steps != self.file.trial_steps:
            progress += f" sweep.trial_steps was {earlier.trial_steps}: what was measured before is kept."
        self.report_earlier(trials, progress)

    def board(self) -> Leaderboard:
        """Returns the leaderboard of the rows so far."""
        assert self.trials is not None
        return leaderboard(self.file, self.trials.kept.found)

    @property
    def _publishes(self) -> bool:
        """Whether the leaderboard is to be copied into wandb."""
        return wandb_sink.decide_mode(self.config.logger.mode.value) != "disabled"

    def publish(self) -> None:
        """Copies the leaderboard into wandb; a failure there is reported and costs nothing else."""
        if not self._has_measured or not self._publishes:
            return
        self.screen.say("Putting the leaderboard into wandb")
        try:
            publish(self.folder, self.file, self.config.logger)
        except Exception as error:  # noqa: BLE001  a failing logger must not end a study
            self.screen.say(f"{error}; the files have every figure.")
