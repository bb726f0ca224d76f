"""Runs ``python src/train.py -m search=<option>``, and a plain ``-m``: whole trainings, ranked by their metric.

`search_request` reads what is asked for; `points.proposals` picks what is tried next.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wellfed.command_line import announce, typed_arguments
from wellfed.config.entry import config_flags
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig, SearchPruner, SearchSampler
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError
from wellfed.masking import masked_override
from wellfed.process import StopRequest
from wellfed.record import engine_state
from wellfed.run.train import own_git_state
from wellfed.study import ledger
from wellfed.study.board import files, terminal
from wellfed.study.executors.executor import Executor, ExecutorLost, Launch, Trial
from wellfed.study.executors.launchers import executor_of
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.executors.tasks import MachineSeen, MetricSeen
from wellfed.study.learning_curve import CurvePoint, read_curve, reported_metrics
from wellfed.study.ledger import Ledger
from wellfed.study.objective import of_metric
from wellfed.study.points.space import Choices, describe
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import search_board
from wellfed.study.row import Row, TrialMetric
from wellfed.study.search.metric_probes import MetricProbes
from wellfed.study.search.proposals import AskedPoints, GridPoints, Points, Proposal
from wellfed.study.search.search_request import SearchRequest, asked_for
from wellfed.study.study import Study, masked_values, scratch_folder
from wellfed.study.study_files import SearchFile
from wellfed.study.study_screen import StudyScreen
from wellfed.study.trial_end import RowMaker, code_version
from wellfed.units import counted

_PREPARE_S = 3600
"""Seconds that data and model of a whole training may take."""
_HOPELESS = 5
"""Trials of a sampler that may fail before one has ended well."""


def run_search(multirun: Multirun, launcher: Mapping[str, Any] | None = None, launch: Launch | None = None) -> int:
    """Runs a search; returns 0 if any training ended well.

    Args:
        launcher: as of `run_sweep`.
        launch: as of `run_sweep`.

    Raises:
        ConfigError: no search can be made of this; nothing was run.
    """
    base = multirun.base()
    asked = asked_for(multirun, base, launch)
    screen = StudyScreen(of_metric("", higher_is_better=True), list(asked.space))
    probes = MetricProbes(asked, multirun.compose, is_grid=base.config.search.sampler is SearchSampler.grid)
    study = SearchStudy(asked.folder, screen, StopRequest(), multirun, base.config, asked, probes, launcher, launch)
    return study.go()


class _HopelessError(Exception):
    """Raised when every trial so far failed, and the next would fail alike."""


@dataclass
class SearchStudy(Study):
    """One command of a search."""

    multirun: Multirun
    config: RunConfig
    """Configuration that all points share."""
    asked: SearchRequest
    probes: MetricProbes
    launcher: Mapping[str, Any] | None
    launch: Launch | None
    _kept: Ledger | None = field(default=None, init=False)
    _file: SearchFile | None = field(default=None, init=False)
    _curves: dict[str, list[CurvePoint]] = field(default_factory=dict, init=False)
    """Learning curves by trial folder."""
    _rows_shown: int = field(default=-1, init=False)
    """Rows that the leaderboard on disk was made of."""
    _begun: dict[str, Proposal] = field(default_factory=dict, init=False)
    """Proposals whose trials run, by trial folder."""
    _remote: Executor | None = field(default=None, init=False)
    """Executor on other machines, which takes all trials of a grid at once."""
    _until_s: float = field(default=math.inf, init=False)
    """Time, as `time.monotonic` has it, after which no trial begins."""
    _failed: list[Row] = field(default_factory=list, init=False)
    """Failed trials in a row, with none before that ended well."""

    def __post_init__(self) -> None:
        self.way_on = self.asked.way_on

    @property
    def is_grid(self) -> bool:
        """Whether every combination is tried, without Optuna."""
        return self.config.search.sampler is SearchSampler.grid

    def run(self) -> None:
        """Runs trials until nothing is left to try, the time is over, or nothing can be won any more."""
        earlier, options = self._earlier(), self.config.search
        prepare_to_fork(self.config)
        announce("Search: importing PyTorch, reading data, building the model")
        with scratch_folder(self.folder / ".scratch") as scratch:
            maker = RowMaker("search")
            code = code_version(own_git_state(), engine_state())
            settings = self.settings(scratch, options.timeout_s, code, maker, options.timeout_s or _PREPARE_S)
            with LocalExecutor(settings) as here:
                machine, seen = self.probes.see(here)
                self._file = file = self._search_file(code, machine, seen)
                if earlier is not None and self.is_grid:
                    _check_same(earlier, file, self._another())
                maker.metric = metric = TrialMetric(seen.name, seen.mode)
                self.screen.objective = file.ranked_by
                retry = [status.value for status in options.retry]
                self._kept = kept = Ledger(
                    self.folder, self.screen, file.ranked_by, file.code, retry, file.ids or None, metric
                )
                points = self._points(kept, file, parallel=len(here.plans.gpus) // max(1, self.config.trainer.devices))
                file.write(self.folder)
                self._say_begin(kept, file)
                if options.max_minutes is not None:
                    self._until_s = time.monotonic() + 60 * options.max_minutes
                if self.launcher is None:
                    self._serve(here, points, kept)
            if self.launcher is not None and points.has_more:
                with executor_of(self.launcher, self.launch, settings) as self._remote:
                    self._serve(self._remote, points, kept)

    def _earlier(self) -> SearchFile | None:
        """Returns what the folder holds.

        Raises:
            ConfigError: a grid, and this is a sampler's, or the other way round.
        """
        try:
            earlier = SearchFile.read(self.folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.screen.say(f"{error} It is written anew.")
            return None
        sampler = self.config.search.sampler.value
        if (earlier.sampler == "grid") != self.is_grid:
            problem = f"holds a search with search.sampler={earlier.sampler}; this one has search.sampler={sampler}."
            raise ConfigError.of(str(self.folder), problem, self._another())
        return earlier

    def _another(self) -> str:
        return f"Give this one a folder of its own: search.name={self.asked.name}_2."

    def _search_file(self, code: str, machine: MachineSeen, metric: MetricSeen) -> SearchFile:
        options, asked = self.config.search, self.asked
        return SearchFile(
            name=asked.name,
            workload=self.config.workload.name,
            metric=metric.name,
            mode=metric.mode,
            space={
                name: Choices(masked_values(name, axis.values)) if isinstance(axis, Choices) else axis
                for name, axis in asked.space.items()
            },
            fixed=tuple(map(masked_override, asked.fixed)),
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            max_trials=options.max_trials,
            code=code,
            machine="" if self.launcher is not None else machine.description,
            ids=tuple(point.id for point in asked.grid.points()) if self.is_grid else (),
            flags=tuple(config_flags(typed_arguments())),
        )

    def _points(self, kept: Ledger, file: SearchFile, *, parallel: int) -> Points:
        options, asked = self.config.search, self.asked
        if self.is_grid:
            return GridPoints(asked.grid.points(), kept)
        from wellfed.study.points.optuna_study import OptunaStudy

        study = OptunaStudy(
            self.folder,
            file.space,
            mode=file.mode,
            identity=file.identity,
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            seed=options.seed,
            parallel=max(1, parallel),
        )
        most = options.max_trials
        return AskedPoints(study, asked.space, asked.fixed, kept, most=most, pruner=options.pruner.value)

    def _say_begin(self, kept: Ledger, file: SearchFile) -> None:
        """Reports what a ledger that is there holds, then what is searched."""
        options, say, latest = self.config.search, self.screen.say, kept.found.latest()
        kept.say_damaged()
        if latest:
            outcomes = Counter(row.outcome for row in latest.values())
            listed = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
            say(f"Going on in {self.folder}: {listed} so far.")
            codes = {row.code for row in latest.values() if row.outcome == "complete"}
            if changed := sorted(codes - {file.code}):
                say(
                    f"The code has changed since ({', '.join(changed)} -> {file.code}): what was trained before is "
                    "kept. To train all again: another search.name."
                )
            kept.say_kept("search")
        best = "most" if file.higher_is_better else "least"
        say(f"Search {self.asked.name} by val/{file.metric}, {best} is best, in {self.folder}")
        if self.asked.space:
            say(f"Axes: {describe(file.space)}")
        if not self.is_grid:
            say(f"Up to {counted(options.max_trials, 'trial')}, sampler {options.sampler}, pruner {options.pruner}")

    # -- while trials run ------------------------------------------------------------------------------------------

    def _serve(self, executor: Executor, points: Points, kept: Ledger) -> None:
        """Runs what the points propose, and gives them each end."""

        def more() -> Trial | None:
            while time.monotonic() < self._until_s and (proposal := points.next()) is not None:
                if (trial := self._trial(proposal, points, kept)) is not None:
                    return trial
            return None

        def prune(trial: Trial, validation: int, value: float) -> str | None:
            return points.prune(self._begun[trial.key], validation, value)

        try:
            for trial, row in executor.run(more=more, prune=prune):
                self._curves.pop(row.folder, None)
                kept.add(row)
                self._ended(self._begun.pop(trial.key), row, points, kept)
        except _HopelessError as hopeless:
            self.screen.say(str(hopeless))
            return
        except ExecutorLost as lost:
            self.screen.say(f"{lost} {self.way_on} again runs what is missing.")
            return
        if time.monotonic() >= self._until_s and (points.has_more or self._begun):
            limit = f"search.max_minutes={self.config.search.max_minutes:g}"
            self.screen.say(f"{limit} are over. {self.way_on} goes on, for as long again.")

    def _trial(self, proposal: Proposal, points: Points, kept: Ledger) -> Trial | None:
        """Returns the trial of a proposal; None if it does not compose, which is its row."""
        point = proposal.point
        try:
            composed = self.multirun.compose(point.overrides, self.folder / point.id)
        except ConfigError as error:
            row = kept.refuse(point, "invalid", " ".join(map(str, error.faults)), proposal.number)
            self._ended(proposal, row, points, kept)
            return None
        row = kept.begin(point, "trial", proposal.number)
        self._begun[row.folder] = proposal
        self.screen.began(row)
        asks = self.config.search.pruner is not SearchPruner.none
        return Trial(composed, point.overrides, row, is_timed=False, may_be_pruned=asks)

    def _ended(self, proposal: Proposal, row: Row, points: Points, kept: Ledger) -> None:
        """Reports an end to the points, and decides whether to go on.

        Raises:
            ConfigError: no trial can be ranked by what was asked for.
            _HopelessError: all have failed.
        """
        points.ended(proposal, row)
        others = [each for each in kept.found.rows if each is not row]
        asked = self.config.trainer.best_metric
        message = "" if row.error is None else str(row.error["message"])
        if not others and row.status == "invalid" and message.startswith(f"trainer.best_metric={asked}:"):
            where, _, rest = message.partition(": ")
            raise ConfigError.of(where, rest, "")
        if row.status == "ok" and row.outcome == "failed" and not row.validations:
            names = ", ".join(reported_metrics(self.folder / row.folder)) or "none"
            raise _HopelessError(
                f"Stopped: validation gives no {self.screen.objective.name}, so no training can be ranked. It gives: "
                f"{names}. Name one: trainer.best_metric=<name> trainer.best_mode=min, with another search.name."
            )
        if row.outcome != "failed" or any(each.outcome != "failed" for each in others):
            self._failed.clear()
            return
        self._failed.append(row)
        if not self.is_grid and len(self._failed) >= _HOPELESS:
            why = message or row.status
            raise _HopelessError(f"Stopped: all of the first {_HOPELESS} trials failed, the last with: {why}")

    def tick(self) -> None:
        """Keeps the leaderboard on disk up to date, and other machines to the time."""
        if self._kept is not None and len(self._kept.found.rows) != self._rows_shown:
            self._write()
        if self._remote is not None and time.monotonic() >= self._until_s:
            self._remote.start_no_more()

    # -- at the end ------------------------------------------------------------------------------------------------

    def _write(self) -> Leaderboard:
        """Writes the leaderboard of the rows so far."""
        kept, file = self._kept, self._file
        assert kept is not None
        assert file is not None
        self._rows_shown = len(kept.found.rows)
        for row in kept.found.latest().values():
            if row.folder and row.folder not in self._curves:
                self._curves[row.folder] = read_curve(self.folder / row.folder, file.metric)
        board = search_board(file, kept.found, self._curves)
        try:
            file.write(self.folder)
            files.write(self.folder, board)
        except OSError as error:
            self.screen.say(f"The leaderboard can't be written: {error}. The rows are in {ledger.FILE_NAME}.")
        return board

    def finish(self) -> int:
        """Writes and shows the leaderboard of what is there; returns the exit code."""
        if self._kept is None:
            return EXIT_FAILED
        board = self._write()
        terminal.show(self.screen.console, board, [self.folder / name for name in files.NAMES])
        return EXIT_FAILED if board.best is None else EXIT_OK

    def says_stopped(self) -> str:
        """Returns the message after a signal."""
        return f"Stopped. {self.way_on} goes on; trials that ran begin anew."


def _check_same(earlier: SearchFile, file: SearchFile, way_out: str) -> None:
    """Raises ConfigError: the grid of a folder was another one, not this one with other values."""
    was_and_is = [{**each.identity, "axes": " ".join(sorted(each.space))} for each in (earlier, file)]
    for name, was in was_and_is[0].items():
        if was != (now := was_and_is[1][name]):
            problem = f"holds a search with {name} {was or 'none'}; this one has {name} {now or 'none'}."
            raise ConfigError.of(f"search.name={file.name}", problem, way_out)
