"""Runs ``python src/train.py -m search=<option>``, and a plain ``-m``: whole trainings, ranked by their metric."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from wellfed.command_line import announce
from wellfed.config.compose import Composed
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig, SearchPruner, SearchSampler
from wellfed.errors import ConfigError
from wellfed.study.executors.executor import Executor, Launch
from wellfed.study.executors.fork_server import ForkServerFailed
from wellfed.study.executors.launchers import executor_of
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.objective import of_metric
from wellfed.study.points.space import describe
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import leaderboard
from wellfed.study.request import probe_of, study_request
from wellfed.study.rows import Kept, Row, reported_metrics
from wellfed.study.search.points import GridPoints, Points, Proposal
from wellfed.study.study import MultirunStudy, StudyScreen, Trials, scratch_folder
from wellfed.study.study_files import SearchFile
from wellfed.study.trial_end import Trial, TrialMetric
from wellfed.units import counted

_PREPARE_S = 3600
"""Seconds that data and model of a whole training may take."""


class NothingToRank(ConfigError):
    """Trainings that have no validation split."""

    problem = "has no validation split: there is no metric to rank trainings by."


def run_search(multirun: Multirun, launch: Launch | None = None) -> int:
    """Runs a search; returns 0 if any training ended well. ``launch`` is as `MultirunStudy` has it.

    Raises:
        ConfigError: no search can be made of this; nothing was run. A NothingToRank if there is no metric.
    """
    base = multirun.base()
    asked = study_request("search", multirun, base, launch)
    probe = probe_of(asked, multirun.compose, is_grid=base.config.search.sampler is SearchSampler.grid)
    screen = StudyScreen(of_metric("", higher_is_better=True), list(asked.space))
    return SearchStudy(asked.folder, screen, multirun, base.config, asked, launch, probe).go()


@dataclass
class SearchStudy(MultirunStudy):
    """One command of a search."""

    goes_on = "goes on; trials that ran begin anew."

    probe: Composed[RunConfig]
    """Configuration whose data and model show the metric."""
    until_s: float = field(default=math.inf, init=False)
    """Time, as `time.monotonic` has it, after which no trial begins."""
    _file: SearchFile | None = field(default=None, init=False)
    _is_hopeless: str = field(default="", init=False)
    """Why no further trial can be ranked; empty as long as one may."""

    @property
    def is_grid(self) -> bool:
        """Whether every combination is tried, without Optuna."""
        return self.config.search.sampler is SearchSampler.grid

    @property
    def file(self) -> SearchFile:
        """Facts that the trials share; there once the metric is known."""
        assert self._file is not None
        return self._file

    def run(self) -> None:
        """Runs trials until nothing is left to try, the time is over, or nothing can be won any more."""
        earlier, options = self.earlier(), self.config.search
        prepare_to_fork(self.config)
        announce("Search: importing PyTorch, reading data, building the model")
        with scratch_folder(self.folder / ".scratch") as scratch:
            settings = self.settings(scratch, options.timeout_s, "search", options.timeout_s or _PREPARE_S)
            with LocalExecutor(settings) as here:
                here.expect(self.probe, is_one=self.asked.shares_model)
                if not self.is_grid:
                    import wellfed.study.search.asked_points  # noqa: F401  while data and model are made
                trials = self.begin(_metric_of(here, self.probe, self.folder), earlier)
                points = self.propose(trials, parallel=len(here.gpus) // max(1, self.config.trainer.devices))
                self._report_begin(trials, is_new=earlier is None)
                if options.max_minutes is not None:
                    self.until_s = time.monotonic() + 60 * options.max_minutes
                if self.launch is None:
                    self.serve(here, points, trials)
            if self.launch is not None and points.has_more:
                with executor_of(self.launch, settings) as there:
                    self.serve(there, points, trials)

    def earlier(self) -> SearchFile | None:
        """Returns what the folder holds; None if that is nothing, or unknown.

        Raises:
            ConfigError: a grid, and this is a sampler's, or the other way round.
        """
        earlier, now = self.read_earlier(SearchFile), self.config.search.sampler.value
        if earlier is not None and (earlier.sampler == "grid") != self.is_grid:
            raise self._another(f"search.sampler={earlier.sampler}", f"search.sampler={now}")
        return earlier

    def _another(self, was: str, now: str) -> ConfigError:
        way_out = f"Give this one a folder of its own: search.name={self.asked.name}_2. What is there stays as it is."
        return ConfigError.of(str(self.folder), f"holds a search with {was}; this one has {now}.", way_out)

    def begin(self, metric: TrialMetric, earlier: SearchFile | None) -> Trials:
        """Returns the trials, ranked by this metric, with the rows of earlier commands; writes ``search.json``.

        Raises:
            ConfigError: the folder holds another search, which is more than other values of a grid.
        """
        options, asked = self.config.search, self.asked
        self._file = file = SearchFile(
            **self.facts,
            metric=metric.name,
            mode=metric.mode,
            space=asked.space,
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            max_trials=options.max_trials,
            ids=tuple(point.id for point in asked.grid.points()) if self.is_grid else (),
        )
        for name, was in earlier.identity.items() if earlier is not None else ():
            if was != (now := file.identity[name]):
                raise self._another(f"{name} {was or 'none'}", f"{name} {now or 'none'}")
        file.write(self.folder)
        self.screen.objective = file.ranked_by
        was = "" if earlier is None else earlier.code  # an earlier command ran what it left without its end
        kept = Kept(self.folder, file.ranked_by, file.code, options.retry, file.ids or None, metric, was, "search")
        self.trials = Trials(kept, self.screen, self.multirun.compose, self.way_on)
        return self.trials

    def propose(self, trials: Trials, *, parallel: int) -> Points:
        """Returns the source of points; ``parallel`` is the number of trials at a time."""
        options, asked, file = self.config.search, self.asked, self.file
        if self.is_grid:
            return GridPoints(asked.grid.points(), trials.kept)
        from wellfed.study.search.asked_points import AskedPoints

        return AskedPoints(asked.space, asked.fixed, trials.kept, options, file.mode, parallel=max(1, parallel))

    def _report_begin(self, trials: Trials, *, is_new: bool) -> None:
        """Reports what the folder holds, then what is searched."""
        options, say, file = self.config.search, self.screen.say, self.file
        if not is_new:
            outcomes = Counter(row.outcome for row in trials.kept.found.latest.values())
            listed = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
            self.report_earlier(trials, f"{listed or 'no trial'} so far.")
        best = "most" if file.ranked_by.higher_is_better else "least"
        say(f"Search {file.name} by val/{file.metric}, {best} is best, in {self.folder}")
        if file.space:
            say(f"Axes: {describe(file.space)}")
        if not self.is_grid:
            say(f"Up to {counted(options.max_trials, 'trial')}, sampler {options.sampler}, pruner {options.pruner}")

    # -- while trials run ------------------------------------------------------------------------------------------

    def serve(self, executor: Executor, points: Points, trials: Trials) -> None:
        """Runs what the points propose, and gives them each end."""

        def more() -> Trial | None:
            while not self._is_hopeless and time.monotonic() < self.until_s and (proposal := points.next()) is not None:
                if (trial := self._trial(proposal, points, trials)) is not None:
                    return trial
            return None

        def prune(trial: Trial, validation: int, value: float) -> str | None:
            return points.prune(trial.point, validation, value)

        for _, row in trials.run(executor, more=more, prune=prune):
            self._ended(row, points, trials)
            if self._is_hopeless:
                break
        if self._is_hopeless:
            self.screen.say(f"Stopped: {self._is_hopeless}")
        elif not trials.is_lost and time.monotonic() >= self.until_s and points.has_more:
            limit = f"search.max_minutes={self.config.search.max_minutes:g}"
            self.screen.say(f"{limit} are over. {self.way_on} goes on, for as long again.")

    def _trial(self, proposal: Proposal, points: Points, trials: Trials) -> Trial | None:
        """Returns the trial of a proposal; None if it does not compose, which is its row."""
        number, point = proposal
        if (error := trials.compose(point)) is not None:
            self._ended(trials.refuse(point, error, number), points, trials)
            return None
        asks = self.config.search.pruner is not SearchPruner.none
        trial = trials.trial(point.id, number=number, may_be_pruned=asks)
        del trials.ready[point.id]  # a long search does not keep all configurations
        self.screen.began(trial)
        return trial

    def _ended(self, row: Row, points: Points, trials: Trials) -> None:
        """Reports an end to the points, and notes if no further trial can be ranked.

        Raises:
            ConfigError: the first trial has no such metric as was asked for.
        """
        points.ended(row)
        rows = trials.kept.found.rows
        asked = self.config.trainer.best_metric
        message = "" if row.error is None else str(row.error["message"])
        if len(rows) == 1 and row.status == "invalid" and message.startswith(f"trainer.best_metric={asked}:"):
            where, _, rest = message.partition(": ")
            raise ConfigError.of(where, rest, "")
        if row.status == "ok" and row.outcome == "failed" and not row.validations:
            names = ", ".join(reported_metrics(self.folder / row.folder)) or "none"
            self._is_hopeless = (
                f"validation gives no {self.screen.objective.name}, so no training can be ranked. It gives: "
                f"{names}. Name one: trainer.best_metric=<name> trainer.best_mode=min, with another search.name."
            )

    def board(self) -> Leaderboard:
        """Returns the leaderboard of the rows so far."""
        assert self.trials is not None
        return leaderboard(self.file, self.trials.kept.found)


def _metric_of(here: LocalExecutor, probe: Composed[RunConfig], folder: Path) -> TrialMetric:
    """Returns the metric that ranks, from data and model of a point.

    Raises:
        ConfigError: no data and model could be made, or they give no metric.
    """
    try:
        answers = here.ask(probe, "see_metric")
    except ForkServerFailed as failed:
        raise ConfigError.of("data and model", str(failed), "") from failed
    if len(answers) != 1:
        raise ConfigError.of("data and model", "could not be looked at.", f"See the files in {folder}.")
    if (metric := answers[0]) is None:
        way_out = "Return Datasets(..., val=...), or run them without comparison: hydra/sweeper=basic."
        raise NothingToRank.of(f"workload={probe.config.workload.name}", NothingToRank.problem, way_out)
    if not isinstance(metric, TrialMetric):
        raise ConfigError(metric)
    return metric
