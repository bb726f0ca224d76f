"""Runs ``python src/train.py -m search=<option>``, and a plain ``-m``: whole trainings, then a table by their metric.

Each trial is a process of its own with a run folder of its own; whatever becomes of it is a row, and the same command
again goes on. The order of things is here; `search_points` says what is tried, `search_ledger` keeps what came of it.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

from wellfed.command_line import words
from wellfed.config.compose import Composed
from wellfed.config.entry import where_flags
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig, SearchPruner, SearchSampler
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError, DataError
from wellfed.masking import masked_override
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of
from wellfed.record import Status, engine_state
from wellfed.run.folder.lock import made, only_one
from wellfed.run.ranks.announce import announce
from wellfed.run.train import own_git_state
from wellfed.study.executors.executor import (
    Executor,
    ExecutorLost,
    Launch,
    StudySettings,
    Trial,
    row_of_end,
)
from wellfed.study.executors.fork_server import ForkServerFailed
from wellfed.study.executors.launchers import executor_of, is_remote
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.executors.tasks import MachineSeen, MetricSeen, SeeMetric, shared_key
from wellfed.study.search.curves import reported_metrics
from wellfed.study.search.search_file import SearchFile
from wellfed.study.search.search_rows import SearchRow, row_of_training
from wellfed.study.search.space import Choices, describe
from wellfed.study.sweep.rows import code_version, refused_row
from wellfed.study.trials.search_ledger import SearchLedger
from wellfed.study.trials.search_points import AskedPoints, GridPoints, Points, Proposal
from wellfed.study.trials.search_request import SearchRequest, asked_for
from wellfed.study.trials.search_screen import SearchScreen
from wellfed.study.trials.sweep import masked_values
from wellfed.study.trials.trial_setup import scratch_folder
from wellfed.units import counted

_PREPARE_S = 3600
"""Data and model of a whole training may take their time."""
_HOPELESS = 5
"""Trials of a sampler that may fail before one has ended well."""
_MOST_PROBES = 5
"""Points whose data and model are made to see what ranks, before it is said that there are none."""


def run_search(multirun: Multirun, launcher: Mapping[str, Any] | None = None, launch: Launch | None = None) -> int:
    """All of it; 0 if any training ended well.

    Args:
        launcher: as of `run_sweep`.
        launch: as of `run_sweep`.

    Raises:
        ConfigError: no search can be made of this; nothing was run.
    """
    base = multirun.base()
    asked = asked_for(multirun, base, launch)
    folder, is_new = asked.folder, not asked.folder.exists()
    stop = StopRequest()
    search = RunningSearch(multirun, base, asked, SearchScreen(), stop, launcher, launch)
    search.compose_one()
    with only_one(made(folder)), stop.listening():
        try:
            search.run()
            return search.finish()
        except (Stopped, KeyboardInterrupt):
            stop.is_finishing = True  # an impatient second signal must not become a traceback
            search.finish()
            search.screen.say(f"Stopped. {asked.way_on} goes on; trials that ran begin anew.")
            return exit_code_of(stop.signum or signal.SIGINT)
        except ConfigError:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as error:  # a disk that is full, above all
            exit_code = search.finish()
            where = f" ({error.filename})" if error.filename else ""
            search.screen.say(f"Stopped: {error.strerror or error}{where}. Make room. {asked.way_on} goes on.")
            return exit_code


def _check_same(earlier: SearchFile, file: SearchFile, way_out: str) -> None:
    """Raises ConfigError: the grid of a folder was another one, not this one with other values."""
    was_and_is = [{**each.identity, "axes": " ".join(sorted(each.space))} for each in (earlier, file)]
    for name, was in was_and_is[0].items():
        if was != (now := was_and_is[1][name]):
            problem = f"holds a search with {name} {was or 'none'}; this one has {name} {now or 'none'}."
            raise ConfigError.of(f"search.name={file.name}", problem, way_out)


class _Hopeless(Exception):
    """What all trials so far have failed with would be that of the next, too."""


@dataclass
class RunningSearch:
    """One command."""

    multirun: Multirun
    base: Composed[RunConfig]
    """What all points share."""
    asked: SearchRequest
    screen: SearchScreen
    stop: StopRequest
    launcher: Mapping[str, Any] | None
    launch: Launch | None
    _probes: Iterator[Composed[RunConfig]] = field(default_factory=lambda: iter(()), init=False)
    """Configurations of points: data and model of the first that has some tell what all are ranked by."""
    _ledger: SearchLedger | None = field(default=None, init=False)
    _executor: Executor | None = field(default=None, init=False)
    _begun: dict[str, Proposal] = field(default_factory=dict, init=False)
    _failed: list[SearchRow] = field(default_factory=list, init=False)
    """In a row, with none before that ended well."""

    @property
    def config(self) -> RunConfig:
        """Of the search: what all points share."""
        return self.base.config

    @property
    def is_grid(self) -> bool:
        """Every combination, without Optuna."""
        return self.config.search.sampler is SearchSampler.grid

    def compose_one(self) -> None:
        """The first point that composes.

        Raises:
            ConfigError: there is none; the faults of the first.
        """
        first: list[ConfigError] = []
        composed = self._composed(first)
        try:
            one = next(composed)
        except StopIteration:
            raise first[0] from None
        self._probes = islice(chain([one], composed), _MOST_PROBES)

    def _composed(self, faults: list[ConfigError]) -> Iterator[Composed[RunConfig]]:
        """Points that compose, one of each data and model."""
        seen = set()
        for point in self.asked.grid.points() if self.is_grid else self.asked.probes():
            try:
                composed = self.multirun.compose(point.overrides, self.asked.folder / point.id)
            except ConfigError as error:
                faults.append(error)
                continue
            if (shared := shared_key(composed.config)) not in seen:
                seen.add(shared)
                yield composed

    def run(self) -> None:
        """Until nothing is left to try."""
        earlier = self._earlier()
        prepare_to_fork(self.config)
        announce("Search: importing PyTorch, reading data, building the model")
        options = self.config.search
        settings = self._settings()
        with scratch_folder(settings.scratch):
            with LocalExecutor(settings) as local:
                machine, metric = self._see(local)
                file = self._file(machine, metric)
                if earlier is not None and self.is_grid:
                    _check_same(earlier, file, self._another())
                retry = [status.value for status in options.retry]
                self._ledger = ledger = SearchLedger(self.asked.folder, file, retry, self.screen)
                parallel = len(local.gpus) // max(1, local.num_gpus(self.base))
                points = self._points(ledger, metric, parallel=max(1, parallel))
                ledger.file.write(self.asked.folder)
                ledger.say_what_changed()
                self._say_begin(ledger)
                until_s = math.inf if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes
                settings = replace(settings, row_of=partial(row_of_training, file=file), tick=self._tick(until_s))
                if self.launcher is None:
                    local.settings = settings
                    self._serve(local, points, ledger, until_s)
            # The libraries of other machines may start threads, which do not survive the forks above.
            if self.launcher is not None and points.has_more:
                with executor_of(self.launcher, self.launch, settings) as self._executor:
                    self._serve(self._executor, points, ledger, until_s)

    def _settings(self) -> StudySettings:
        """Returns what all trials share, before it is known what ranks them."""
        return StudySettings(
            folder=self.asked.folder,
            scratch=self.asked.folder / ".scratch",
            timeout_s=math.inf if self.config.search.timeout_s is None else self.config.search.timeout_s,
            prepare_s=self.config.search.timeout_s or _PREPARE_S,
            group="search",
            code=code_version(own_git_state(), engine_state()),
            row_of=partial(row_of_end, group="search"),
            say=self.screen.say,
            tick=lambda: None,
            stop=self.stop,
        )

    def _tick(self, until_s: float) -> Callable[[], None]:
        """Returns what is called a few times a second while trials run."""

        def tick() -> None:
            if self._ledger is not None:
                self._ledger.write_if_new()
            if time.monotonic() >= until_s and self._executor is not None:
                self._executor.start_no_more()

        return tick

    def finish(self) -> int:
        """The leaderboard of what is there; the exit code."""
        if self._ledger is None:
            return EXIT_FAILED
        made = self._ledger.write()
        self.screen.finished(made, self.asked.folder)
        return EXIT_FAILED if made.best is None else EXIT_OK

    # -- before the first trial ------------------------------------------------------------------------------------

    def _earlier(self) -> SearchFile | None:
        """What the folder holds.

        Raises:
            ConfigError: a grid, and this is a sampler's, or the other way round.
        """
        try:
            earlier = SearchFile.read(self.asked.folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.screen.say(f"{error} It is written anew.")
            return None
        sampler = self.config.search.sampler.value
        if (earlier.sampler == "grid") != self.is_grid:
            problem = f"holds a search with search.sampler={earlier.sampler}; this one has search.sampler={sampler}."
            raise ConfigError.of(str(self.asked.folder), problem, self._another())
        return earlier

    def _another(self) -> str:
        return f"Give this one a folder of its own: search.name={self.asked.name}_2."

    def _see(self, local: LocalExecutor) -> tuple[MachineSeen, MetricSeen]:
        """What trials run on and are ranked by.

        Raises:
            ConfigError: no data and model could be made; the fault of the first.
        """
        first: ConfigError | None = None
        for probe in self._probes:
            try:
                machine, metric = self._seen(probe.config, local)
            except ConfigError as error:
                first = first or error
                continue
            if not metric.is_validated:
                problem = "has no validation split: there is no metric to rank trainings by."
                way_out = "Return Datasets(..., val=...), or run them without comparison: hydra/sweeper=basic."
                raise ConfigError.of(f"workload={probe.config.workload.name}", problem, way_out)
            return machine, metric
        assert first is not None
        raise first

    def _seen(self, config: RunConfig, local: LocalExecutor) -> tuple[MachineSeen, MetricSeen]:
        """Looks at the data and model of one point."""
        try:
            if MAY_FORK:
                answers = local.ask(config, SeeMetric(config))
                machine = local.machine
            else:
                import torch

                from wellfed.study.executors import trial_work

                shared = trial_work.prepare(config)
                torch.set_num_threads(shared.num_threads)
                machine, metric = trial_work.see_metric(shared.parts, config)
                return machine, metric
        except (ForkServerFailed, DataError) as failed:
            raise ConfigError.of("data and model", str(failed), "") from failed
        if machine is None or not answers:
            raise ConfigError.of("data and model", "could not be looked at.", f"See the files in {self.asked.folder}.")
        return machine, answers[0]

    def _file(self, machine: MachineSeen, metric: MetricSeen) -> SearchFile:
        options, asked = self.config.search, self.asked
        space = {
            name: Choices(masked_values(name, axis.values)) if isinstance(axis, Choices) else axis
            for name, axis in asked.space.items()
        }
        return SearchFile(
            name=asked.name,
            workload=self.config.workload.name,
            metric=metric.name,
            mode=metric.mode,
            space=space,
            fixed=tuple(map(masked_override, asked.fixed)),
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            max_trials=options.max_trials,
            code=code_version(own_git_state(), engine_state()),
            machine="" if is_remote(self.launcher) else machine.description,
            ids=tuple(point.id for point in asked.grid.points()) if self.is_grid else (),
            flags=tuple(where_flags(words())),
        )

    def _points(self, ledger: SearchLedger, metric: MetricSeen, *, parallel: int) -> Points:
        options, asked = self.config.search, self.asked
        if self.is_grid:
            return GridPoints(asked.grid.points(), ledger)
        from wellfed.study.search.study import Study

        study = Study(
            asked.folder,
            ledger.file.space,
            mode=metric.mode,
            identity=ledger.file.identity,
            sampler=options.sampler.value,
            pruner=options.pruner.value,
            seed=options.seed,
            parallel=parallel,
        )
        most = options.max_trials
        return AskedPoints(study, asked.space, asked.fixed, ledger, most=most, pruner=options.pruner.value)

    def _say_begin(self, ledger: SearchLedger) -> None:
        options, say = self.config.search, self.screen.say
        best = "most" if ledger.file.higher_is_better else "least"
        say(f"Search {self.asked.name} by val/{ledger.file.metric}, {best} is best, in {self.asked.folder}")
        if self.asked.space:
            say(f"Axes: {describe(ledger.file.space)}")
        if not self.is_grid:
            say(f"Up to {counted(options.max_trials, 'trial')}, sampler {options.sampler}, pruner {options.pruner}")

    # -- while trials run ------------------------------------------------------------------------------------------

    def _serve(self, executor: Executor, points: Points, ledger: SearchLedger, until_s: float) -> None:
        """Runs trials until nothing is left to try, or the time is over."""

        def more() -> Trial | None:
            while time.monotonic() < until_s and (proposal := points.next()) is not None:
                trial = self._trial(proposal, points, ledger)
                if trial is not None:
                    return trial
            return None

        def prune(trial: Trial, number: int, value: float) -> str | None:
            proposal = self._begun[trial.row.point]
            return points.judge(proposal, number, value)

        try:
            for _, row in executor.run(more=more, prune=prune):
                assert isinstance(row, SearchRow)
                self._ended(self._begun.pop(row.point), row, points, ledger)
        except _Hopeless as hopeless:
            self.screen.say(str(hopeless))
            return
        except ExecutorLost as lost:
            self.screen.say(f"{lost} The same command again runs what is missing.")
        if time.monotonic() >= until_s and (points.has_more or self._begun):
            self._say_over()

    def _say_over(self) -> None:
        limit = f"search.max_minutes={self.config.search.max_minutes:g}"
        self.screen.say(f"{limit} are over. {self.asked.way_on} goes on, for as long again.")

    def _trial(self, proposal: Proposal, points: Points, ledger: SearchLedger) -> Trial | None:
        """Returns the trial of a proposal; None where the point does not compose, which is its row."""
        composed, point = self._composed_point(proposal, points, ledger), proposal.point
        if composed is None:
            return None
        ledger.forget_curve(point.id)
        self._begun[point.id] = proposal
        if self.launcher is None:
            self.screen.began(proposal.number, point.values)
        row = replace(ledger.begin(point, proposal.number), host="")
        may_be_pruned = self.config.search.pruner is not SearchPruner.none
        return Trial(composed, point.overrides, row, is_timed=False, may_be_pruned=may_be_pruned)

    def _composed_point(self, proposal: Proposal, points: Points, ledger: SearchLedger) -> Composed[RunConfig] | None:
        """None: the point does not compose, which is its row."""
        try:
            return self.multirun.compose(proposal.point.overrides, ledger.folder / proposal.point.id)
        except ConfigError as error:
            self._refuse(proposal, "invalid", " ".join(map(str, error.faults)), points, ledger)
            return None

    def _refuse(self, proposal: Proposal, status: Status, problem: str, points: Points, ledger: SearchLedger) -> None:
        """A point that is not run."""
        row = replace(refused_row(ledger.begin(proposal.point, proposal.number), status, problem), folder="")
        self._ended(proposal, row, points, ledger)

    def _ended(self, proposal: Proposal, row: SearchRow, points: Points, ledger: SearchLedger) -> None:
        """What became of a trial, to all who must know."""
        ledger.add(row, proposal.point)
        points.ended(proposal, row)
        self._weigh(row, ledger)

    def _weigh(self, row: SearchRow, ledger: SearchLedger) -> None:
        """Whether it is worth while to go on.

        Raises:
            ConfigError: no trial can be ranked by what was asked for.
            _Hopeless: all have failed.
        """
        others = [each for each in ledger.rows if each is not row]
        asked = self.config.trainer.best_metric
        message = "" if row.error is None else str(row.error["message"])
        if not others and row.status == "invalid" and message.startswith(f"trainer.best_metric={asked}:"):
            where, _, rest = message.partition(": ")
            raise ConfigError.of(where, rest, "")
        if row.status == "ok" and row.outcome == "failed" and not row.validations:
            names = ", ".join(reported_metrics(ledger.folder / row.folder)) or "none"
            raise _Hopeless(
                f"Stopped: validation gives no {ledger.file.metric}, so no training can be ranked. It gives: {names}. "
                "Name one: trainer.best_metric=<name> trainer.best_mode=min, with another search.name."
            )
        if row.outcome != "failed" or any(each.outcome != "failed" for each in others):
            self._failed.clear()
            return
        self._failed.append(row)
        if not self.is_grid and len(self._failed) >= _HOPELESS:
            why = message or row.status
            raise _Hopeless(f"Stopped: all of the first {_HOPELESS} trials failed, the last with: {why}")
