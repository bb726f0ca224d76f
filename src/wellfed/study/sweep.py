"""Runs ``python src/train.py -m sweep=<option>``: every combination a timed trial, the best again, then the ranks.

All points are composed and planned before the first is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from wellfed.command_line import announce, typed_arguments
from wellfed.config.compose import Composed
from wellfed.config.entry import config_flags
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError, Fault
from wellfed.masking import masked_override
from wellfed.observe.loggers.wandb_sink import decide_mode
from wellfed.process import MAY_FORK, StopRequest
from wellfed.record import engine_state
from wellfed.run.train import own_git_state
from wellfed.study import ledger
from wellfed.study.board import files, terminal
from wellfed.study.energy import check_energy
from wellfed.study.executors.executor import Executor, ExecutorLost, Launch
from wellfed.study.executors.launchers import executor_of, is_remote
from wellfed.study.executors.local import prepare_to_fork
from wellfed.study.executors.tasks import MachineSeen
from wellfed.study.ledger import Ledger
from wellfed.study.points.grid import Grid
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.row import RowKind
from wellfed.study.study import Study, TimedTrials, check_one_machine, masked_values, named_folder, scratch_folder
from wellfed.study.study_files import SweepFile
from wellfed.study.study_screen import StudyScreen
from wellfed.study.trial_end import RowMaker, code_version
from wellfed.units import counted, show_duration

if TYPE_CHECKING:
    from wellfed.study.row import Row

_GUESSED_TRIAL_S = 5


def run_sweep(multirun: Multirun, launcher: Mapping[str, Any] | None = None, launch: Launch | None = None) -> int:
    """Runs a sweep; returns 0 if any trial is ok.

    Args:
        launcher: configuration of another launcher than ours; None = processes of our own, one a GPU at a time.
        launch: runs jobs by that launcher, where its machines are unknown to us.

    Raises:
        ConfigError: no sweep can be made of this; nothing was run.
    """
    base = multirun.base()
    grid, folder = _checked(multirun, base, is_here=launcher is None)
    file = _sweep_file(base, grid)
    screen = StudyScreen(file.ranked_by, file.axis_names, file.sample_unit)
    return SweepStudy(folder, screen, StopRequest(), multirun, base.config, grid, file, launcher, launch).go()


@dataclass
class SweepStudy(Study):
    """One command of a sweep."""

    multirun: Multirun
    config: RunConfig
    """Configuration that all points share."""
    grid: Grid
    file: SweepFile
    launcher: Mapping[str, Any] | None
    launch: Launch | None
    _ledger: Ledger | None = field(default=None, init=False)

    def run(self) -> None:
        """Runs what is missing, then the best again in turns."""
        options, points = self.config.sweep, self.grid.points()
        retry = [status.value for status in options.retry]
        self._ledger = kept = Ledger(
            self.folder, self.screen, self.file.ranked_by, self.file.code, retry, self.file.ids
        )
        self._say_what_changed(kept)
        known = kept.found.latest()
        for point in points:
            if point.id not in known:
                kept.adopt(point)
        trials = TimedTrials(kept, self.screen, self.multirun.compose)
        trials.compose(points)
        if not (kept.missing(trials.ready) or (self._measures_again and kept.to_confirm(trials.ready))):
            return
        prepare_to_fork(self.config)
        announce(f"Sweep of {counted(self.grid.size, 'point')}: importing PyTorch, reading data, building the model")
        with scratch_folder(self.folder / ".scratch") as scratch:
            settings = self.settings(scratch, options.timeout_s, self.file.code, RowMaker())
            with executor_of(self.launcher, self.launch, settings) as executor:
                self._current_file().write(self.folder)
                self._measure(trials, executor)

    def see_machine(self, seen: MachineSeen) -> None:
        """Compares the machine that runs the trials with that of before."""
        if self._ledger is not None:
            self._ledger.note_machine(seen.description)

    @property
    def _measures_again(self) -> bool:
        """Whether the best are measured again; another launcher may run trials at the same time."""
        return self.launcher is None or is_remote(self.launcher)

    def _measure(self, trials: TimedTrials, executor: Executor) -> None:
        kept, options = trials.ledger, self.config.sweep
        if options.fail_fast and self._says_refused(self.grid.size - len(trials.ready)):
            return
        missing = kept.missing(trials.ready)
        self.screen.begin(len(missing), f"Trials: {len(missing)}, in {self.folder}", kept.best())
        if not self._run(trials, executor, missing, "trial") or not self._measures_again:
            return
        again = kept.to_confirm(trials.ready)
        number = len(set(again))
        title = f"Measuring the best again, in turn: {len(again)}, in {self.folder}"
        self.screen.begin(len(again), title, kept.best())
        for first in range(0, len(again), number or 1):
            if not self._run(trials, executor, again[first : first + number], "confirm"):
                return

    def _run(self, trials: TimedTrials, executor: Executor, points: list[str], kind: RowKind) -> bool:
        """Runs these points; returns False if the sweep is to stop here."""
        all_well, refused = True, 0
        try:
            for row in trials.run(executor, points, kind):
                if self.config.sweep.fail_fast and row.status != "ok":
                    executor.start_no_more()
                    all_well = False
                    refused += not row.folder and row.status != "killed"  # refused when it was prepared or planned
        except ExecutorLost:
            return False
        self._says_refused(refused)
        return all_well

    def _says_refused(self, number: int) -> bool:
        """Reports points that can't be run, where one is enough to stop."""
        if number:
            self.screen.say(f"sweep.fail_fast=true, and {counted(number, 'point')} can't be run: none is started.")
        return number > 0

    def _say_what_changed(self, kept: Ledger) -> None:
        """Reports that a ledger is gone on with, and what makes its rows no comparison."""
        say = self.screen.say
        kept.say_damaged()
        try:
            earlier = SweepFile.read(self.folder)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            say(f"{error} It is written anew.")
            return
        kept.machine = earlier.machine
        now, before, rows = set(self.file.ids), set(earlier.ids), kept.latest().values()
        if now == before:
            say(f"Going on in {self.folder}: {len(rows)} of {len(now)} points have a row.")
        else:
            say(
                f"{self.folder} was made with another grid: {len(now - before)} points are new, {len(rows)} have a "
                f"row, {len(before - now)} that this grid lacks stay in {ledger.FILE_NAME}."
            )
        stay = "rows measured before are kept"
        again = "To measure them again: sweep.retry=[ok], or another sweep.name."
        codes = {row.code for row in rows if row.status == "ok"}
        if changed := sorted(codes - {self.file.code}):
            say(f"The code has changed since ({', '.join(changed)} -> {self.file.code}): {stay} and marked. {again}")
        if codes and earlier.trial_steps not in (0, self.file.trial_steps):
            say(f"sweep.trial_steps was {earlier.trial_steps} and is {self.file.trial_steps}: {stay}. {again}")
        kept.say_kept("sweep")

    def _current_file(self) -> SweepFile:
        return replace(self.file, machine="" if self._ledger is None else self._ledger.machine)

    def finish(self) -> int:
        """Ranks what is there; returns the exit code."""
        kept = self._ledger
        if kept is None:
            return EXIT_FAILED
        self.screen.end()
        file = self._current_file()
        board = leaderboard(file, kept.found)
        try:
            file.write(self.folder)  # it may have ended before there was one
            written = files.write(self.folder, board)
        except OSError as error:
            self.screen.say(f"The leaderboard can't be written: {error}. The rows are in {ledger.FILE_NAME}.")
        else:
            terminal.show(self.screen.console, board, written)
        return EXIT_FAILED if kept.best() is None else EXIT_OK

    def says_stopped(self) -> str:
        """Returns the message after a signal."""
        return f"Stopped. {self.way_on} again runs what is missing."

    def publish(self) -> None:
        """Copies the trials into wandb; a failure there is reported and costs nothing else."""
        from wellfed.study.board.publish import is_published, publish

        kept, logger = self._ledger, self.config.logger
        if kept is None or decide_mode(logger.mode.value) == "disabled" or kept.best() is None:
            return
        number = len(kept.found.rows)
        if is_published(self.folder, number):
            return
        self.screen.say("Putting the trials into wandb")
        try:
            rows: list[Row] = list(kept.latest().values())
            publish(self.folder, self._current_file(), rows, logger, number_of_rows=number)
        except (RuntimeError, OSError) as error:
            self.screen.say(f"{error}; the files have every figure.")


def _checked(multirun: Multirun, base: Composed[RunConfig], *, is_here: bool) -> tuple[Grid, Path]:
    """Returns what is to be run, and the folder for it."""
    config, chosen = base.config, f"sweep={base.choices['sweep']}"
    varied, fixed = multirun.varied()
    axes = {name: each.values for name, each in varied.items()}
    if "workload" in axes:
        problem = "is no axis of a sweep: samples/s of different workloads are no comparison."
        way_out = f"Sweep one after the other: workload={axes['workload'][0]}"
        raise ConfigError([Fault(f"workload={','.join(axes['workload'])}", problem, way_out)])
    check_one_machine(config)
    folder = named_folder(multirun, config, "sweep", config.sweep.name or base.choices["sweep"])
    if not axes:
        way_out = "Name values of one knob at least: loader=baseline,balanced"
        raise ConfigError([Fault(chosen, "has no axis: nothing varies.", way_out)])
    grid = Grid(axes, fixed)
    if grid.size > config.sweep.max_trials:
        known = [row.seconds for row in ledger.read(folder).rows if row.seconds > 0]
        each_s = median(known) if known else _GUESSED_TRIAL_S
        basis = "as the trials in its ledger took" if known else "a guess"
        listed = " x ".join(f"{len(values):,} of {axis}" for axis, values in axes.items())
        problem = (
            f"{counted(grid.size, 'combination')} ({listed}), and sweep.max_trials={config.sweep.max_trials}; "
            f"at {show_duration(each_s)} each, {basis}, they take {show_duration(grid.size * each_s)}."
        )
        raise ConfigError([Fault(chosen, problem, f"Name fewer values, or set sweep.max_trials={grid.size}.")])
    if is_here:
        if not MAY_FORK:
            problem = "starts trials by forking, which this system does not offer."
            way_out = "Add hydra/launcher=basic: all in one process."
            raise ConfigError([Fault("hydra/launcher=wellfed", problem, way_out)])
        check_energy(config, axes)
    return grid, folder


def _sweep_file(base: Composed[RunConfig], grid: Grid) -> SweepFile:
    config = base.config
    return SweepFile(
        name=config.sweep.name or base.choices["sweep"],
        workload=config.workload.name,
        sample_unit=config.workload.sample_unit,
        axes={axis: masked_values(axis, values) for axis, values in grid.axes.items()},
        fixed=tuple(map(masked_override, grid.fixed)),
        ids=tuple(point.id for point in grid.points()),
        code=code_version(own_git_state(), engine_state()),
        trial_steps=config.sweep.trial_steps,
        flags=tuple(config_flags(typed_arguments())),
        objective=config.sweep.objective.value,
    )
