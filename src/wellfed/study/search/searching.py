"""Runs ``python src/train.py -m search=<option>``, and a plain ``-m``: whole trainings, ranked by their metric."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from wellfed.command_line import announce
from wellfed.config.compose import Composed
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig, SearchPruner, SearchSampler
from wellfed.errors import ConfigError
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.study.code_version import is_same_code
from wellfed.study.executors.executor import Executor, Launch, Trial
from wellfed.study.executors.fork_server import ForkServerFailed
from wellfed.study.executors.launchers import executor_of
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.executors.point_plans import call
from wellfed.study.executors.tasks import in_words
from wellfed.study.learning_curve import CurvePoint, read_curve, reported_metrics
from wellfed.study.ledger import FILE_NAME, Ledger
from wellfed.study.multirun_study import MultirunStudy
from wellfed.study.objective import of_metric
from wellfed.study.points.space import describe
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.ranking.ranking import search_board
from wellfed.study.request import probes_of, search_request
from wellfed.study.row import Row, TrialMetric
from wellfed.study.search.proposals import AskedPoints, GridPoints, Points, Proposal
from wellfed.study.study import Trials, scratch_folder
from wellfed.study.study_files import SearchFile
from wellfed.study.study_screen import StudyScreen
from wellfed.study.trial_end import RowMaker
from wellfed.units import counted

_PREPARE_S = 3600
"""Seconds that data and model of a whole training may take."""
BOARD_EVERY_S = 5.0
"""Least seconds between two writings of the leaderboard while trials run."""
_BOARD_FRAC = 0.05
"""Largest share of the time for writing it: one of thousands of trials takes seconds."""
_HOPELESS = 5
"""Trials of a sampler that may fail before one has ended well."""


def run_search(multirun: Multirun, launcher: Mapping[str, Any] | None = None, launch: Launch | None = None) -> int:
    """Runs a search; returns 0 if any training ended well. The launchers are as `MultirunStudy` has them.

    Raises:
        ConfigError: no search can be made of this; nothing was run.
    """
    base = multirun.base()
    while True:
        asked = search_request(multirun, base, launch)
        is_grid = base.config.search.sampler is SearchSampler.grid
        probes = probes_of(asked, multirun.compose, is_grid=is_grid)
        if asked.claim():
            break
    screen = StudyScreen(of_metric("", higher_is_better=True), list(asked.space))
    study = SearchStudy(asked.folder, screen, multirun, base.config, asked, launcher, launch)
    study.is_claimed = not asked.is_named
    study.probes = probes
    return study.go()


class _HopelessError(Exception):
    """Raised when every trial so far failed, and the next would fail alike."""


@dataclass
class SearchStudy(MultirunStudy):
    """One command of a search."""

    goes_on = "goes on; trials that ran begin anew."

    probes: Iterator[Composed[RunConfig]] = field(default=iter(()), init=False)
    """Configurations whose data and model show the metric."""
    until_s: float = field(default=math.inf, init=False)
    """Time, as `time.monotonic` has it, after which no trial begins."""
    _file: SearchFile | None = field(default=None, init=False)
    _curves: dict[str, list[CurvePoint]] = field(default_factory=dict, init=False)
    """Learning curves by trial folder."""
    _rows_shown: int = field(default=-1, init=False)
    """Rows that the leaderboard on disk was made of."""
    _board_due_s: float = field(default=0.0, init=False)
    """Time from which the leaderboard may be written again."""
    _begun: set[str] = field(default_factory=set, init=False)
    """Folders of trials that run."""
    _remote: Executor | None = field(default=None, init=False)
    """Executor on other machines, which takes all trials of a grid at once."""
    _failed: int = field(default=0, init=False)
    """Failed trials in a row, with none before that ended well."""

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
            maker = RowMaker("search")
            settings = self.settings(scratch, options.timeout_s, maker, options.timeout_s or _PREPARE_S)
            with LocalExecutor(settings) as here:
                first = next(self.probes)
                here.expect(first, is_one=self.asked.shares_model)
                if not self.is_grid:
                    import wellfed.study.points.optuna_study  # noqa: F401  while data and model are made
                facts, maker.metric = _seen_by(here, chain([first], self.probes), self.folder)
                trials = self.begin(facts, maker.metric, earlier)
                points = self.propose(trials, parallel=len(here.plans.gpus) // max(1, self.config.trainer.devices))
                self._report_begin(trials)
                if options.max_minutes is not None:
                    self.until_s = time.monotonic() + 60 * options.max_minutes
                if self.launcher is None:
                    self.serve(here, points, trials)
            if self.launcher is not None and points.has_more:
                with executor_of(self.launcher, self.launch, settings) as self._remote:
                    self.serve(self._remote, points, trials)

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

    def begin(self, facts: MachineFacts, metric: TrialMetric, earlier: SearchFile | None) -> Trials:
        """Returns the trials, ranked by this metric, with the rows of earlier commands; writes ``search.json``.

        Raises:
            ConfigError: the folder holds another search, which is more than other values of a grid.
        """
        options, asked = self.config.search, self.asked
        self._file = file = SearchFile(
            **self.facts,
            metric=metric.name,
            mode=metric.mode,
            space=asked.masked_space,
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            max_trials=options.max_trials,
            machine="" if self.launcher is not None else in_words(facts),
            ids=tuple(point.id for point in asked.grid.points()) if self.is_grid else (),
        )
        for name, was in earlier.identity.items() if earlier is not None else ():
            if was != (now := file.identity[name]):
                raise self._another(f"{name} {was or 'none'}", f"{name} {now or 'none'}")
        file.write(self.folder)  # before the journal, which does not hold what is searched
        self.screen.objective = file.ranked_by
        was = "" if earlier is None else earlier.code  # an earlier command ran what it left without a row
        kept = Ledger(self.folder, file.ranked_by, file.code, options.retry, file.ids or None, metric, was)
        self.trials = Trials(kept, self.screen, self.multirun.compose, self.way_on, sources=self.sources)
        return self.trials

    def propose(self, trials: Trials, *, parallel: int) -> Points:
        """Returns the source of points; ``parallel`` is the number of trials at a time."""
        options, asked, file = self.config.search, self.asked, self.file
        if self.is_grid:
            return GridPoints(asked.grid.points(), trials.ledger)
        from wellfed.study.points.optuna_study import OptunaStudy

        study = OptunaStudy(
            self.folder,
            file.space,
            mode=file.mode,
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            seed=options.seed,
            parallel=max(1, parallel),
        )
        most, pruner = options.max_trials, options.pruner.value
        return AskedPoints(study, asked.space, asked.fixed, trials.ledger, most=most, pruner=pruner)

    def _report_begin(self, trials: Trials) -> None:
        """Reports what a ledger that is there holds, then what is searched."""
        options, say, file, latest = self.config.search, self.screen.say, self.file, trials.ledger.found.latest
        trials.report_damaged()
        if latest:
            outcomes = Counter(row.outcome for row in latest.values())
            listed = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
            say(f"Going on in {self.folder}: {listed} so far.")
            codes = {row.code for row in latest.values() if row.outcome == "complete"}
            if changed := sorted(code for code in codes if not is_same_code(code, file.code)):
                say(
                    f"The code has changed since ({', '.join(changed)} -> {file.code}): what was trained before is "
                    "kept. To train all again: another search.name."
                )
            trials.report_kept("search")
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
            while time.monotonic() < self.until_s and (proposal := points.next()) is not None:
                if (trial := self._trial(proposal, points, trials)) is not None:
                    return trial
            return None

        def prune(trial: Trial, validation: int, value: float) -> str | None:
            return points.prune(trial.row, validation, value)

        try:
            for trial, row in trials.run(executor, more=more, prune=prune):
                self._curves.pop(row.folder, None)
                self._begun.discard(trial.key)
                self._ended(row, points, trials)
        except _HopelessError as hopeless:
            self.screen.say(str(hopeless))
            return
        if not trials.is_lost and time.monotonic() >= self.until_s and (points.has_more or self._begun):
            limit = f"search.max_minutes={self.config.search.max_minutes:g}"
            self.screen.say(f"{limit} are over. {self.way_on} goes on, for as long again.")

    def _trial(self, proposal: Proposal, points: Points, trials: Trials) -> Trial | None:
        """Returns the trial of a proposal; None if it does not compose, which is its row."""
        point = proposal.point
        if (error := trials.compose(point)) is not None:
            self._ended(trials.refuse(point, error, proposal.number), points, trials)
            return None
        asks = self.config.search.pruner is not SearchPruner.none
        trial = trials.trial(point.id, number=proposal.number, is_timed=False, may_be_pruned=asks)
        del trials.ready[point.id]  # a long search does not keep all configurations
        self._begun.add(trial.key)
        self.screen.began(trial.row)
        return trial

    def _ended(self, row: Row, points: Points, trials: Trials) -> None:
        """Reports an end to the points, and decides whether to go on.

        Raises:
            ConfigError: no trial can be ranked by what was asked for.
            _HopelessError: all have failed.
        """
        points.ended(row)
        others = [each for each in trials.ledger.found.rows if each is not row]
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
            self._failed = 0
            return
        self._failed += 1
        if not self.is_grid and self._failed >= _HOPELESS:
            why = message or row.status
            raise _HopelessError(f"Stopped: all of the first {_HOPELESS} trials failed, the last with: {why}")

    def tick(self) -> None:
        """Writes the leaderboard of new rows, at most every `BOARD_EVERY_S`, and keeps other machines to the time."""
        now_s = time.monotonic()
        is_new = self.trials is not None and len(self.trials.ledger.found.rows) != self._rows_shown
        if is_new and now_s >= self._board_due_s:
            self.write_board(f"Written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC while trials run: see {FILE_NAME}.")
            ended_s = time.monotonic()
            self._board_due_s = ended_s + max(BOARD_EVERY_S, (ended_s - now_s) / _BOARD_FRAC)
        if self._remote is not None and time.monotonic() >= self.until_s:
            self._remote.start_no_more()

    def board(self) -> Leaderboard:
        """Returns the leaderboard of the rows so far."""
        assert self.trials is not None
        found = self.trials.ledger.found
        self._rows_shown = len(found.rows)
        for row in found.latest.values():
            if row.folder and row.folder not in self._curves:
                self._curves[row.folder] = read_curve(self.folder / row.folder, self.file.metric)
        return search_board(self.file, found, self._curves)


def _seen_by(
    here: LocalExecutor, probes: Iterator[Composed[RunConfig]], folder: Path
) -> tuple[MachineFacts, TrialMetric]:
    """Returns the machine, and the metric that ranks, from data and model of the first point that has some.

    Raises:
        ConfigError: no data and model could be made; the fault of the first.
    """
    first: ConfigError | None = None
    for probe in probes:
        try:
            answers = here.plans.ask(probe.config, partial(call, "see_metric", config=probe.config))
        except ForkServerFailed as failed:
            first = first or ConfigError.of("data and model", str(failed), "")
            continue
        if len(answers) != 1 or here.plans.machine is None:
            way_out = f"See the files in {folder}."
            raise ConfigError.of("data and model", "could not be looked at.", way_out)
        if (metric := answers[0]) is None:
            problem = "has no validation split: there is no metric to rank trainings by."
            way_out = "Return Datasets(..., val=...), or run them without comparison: hydra/sweeper=basic."
            raise ConfigError.of(f"workload={probe.config.workload.name}", problem, way_out)
        if not isinstance(metric, TrialMetric):
            first = first or ConfigError(metric)
            continue
        return here.plans.machine, metric
    assert first is not None
    raise first
