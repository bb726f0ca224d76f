"""Runs ``python src/train.py -m search=<option>``, and a plain ``-m``: whole trainings, then a table by their metric.

Each trial is a process of its own with a run folder of its own; whatever becomes of it is a row, and the same command
again goes on. The order of things is here; `search_points` says what is tried, `search_ledger` keeps what came of it.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import wellfed.process
from wellfed.command_line import words
from wellfed.config.compose import Composed
from wellfed.config.entry import where_flags
from wellfed.config.multirun import Multirun
from wellfed.config.quoting import assigned
from wellfed.config.schema import RunConfig, SearchPruner, SearchSampler
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError, DataError
from wellfed.masking import masked_override
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of
from wellfed.record import Status, engine_state
from wellfed.run.folder.lock import made, only_one
from wellfed.run.ranks.announce import announce
from wellfed.run.train import own_git_state
from wellfed.study.clusters.cluster import Cluster
from wellfed.study.search.curves import reported_metrics
from wellfed.study.search.search_file import SearchFile
from wellfed.study.search.search_rows import SearchRow
from wellfed.study.search.space import Choices, describe
from wellfed.study.sweep.rows import code_version, refused_row
from wellfed.study.trials.elsewhere import TrialsElsewhere, cluster_of
from wellfed.study.trials.fork_server import ForkServerFailed, Job
from wellfed.study.trials.node_orders import TrialOrder
from wellfed.study.trials.search_ledger import SearchLedger
from wellfed.study.trials.search_points import AskedPoints, GridPoints, Points, Proposal
from wellfed.study.trials.search_request import SearchRequest, asked_for
from wellfed.study.trials.search_screen import SearchScreen
from wellfed.study.trials.sweep import masked_values, prepare_to_fork
from wellfed.study.trials.sweep_execution import Launch
from wellfed.study.trials.tasks import MachineSeen, MetricSeen, RunPoint, SeeMetric, Validated, shared_key
from wellfed.study.trials.trial_execution import open_trial_folder
from wellfed.study.trials.trial_pool import ForkServers, QueuedTrial, Slots, TrialPool, visible
from wellfed.study.trials.trial_setup import scratch_folder
from wellfed.study.trials.whole_trainings import num_gpus, row_of_training, whole_training
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
    cluster = None if launcher is None else cluster_of(launcher, folder)
    stop = StopRequest()
    search = RunningSearch(multirun, base, asked, SearchScreen(), stop, launch, cluster)
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
    launch: Launch | None
    cluster: Cluster | None
    _probes: Iterator[Composed[RunConfig]] = field(default_factory=lambda: iter(()), init=False)
    """Configurations of points: data and model of the first that has some tell what all are ranked by."""
    _ledger: SearchLedger | None = field(default=None, init=False)
    _begun: dict[str, tuple[Proposal, SearchRow]] = field(default_factory=dict, init=False)
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

    @property
    def _limit_s(self) -> float:
        """Of a trial."""
        return math.inf if self.config.search.timeout_s is None else self.config.search.timeout_s

    @property
    def _prepare_s(self) -> float:
        """Of data and model."""
        return self.config.search.timeout_s or _PREPARE_S

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
        from wellfed.study.trials import trial

        folder, options = self.asked.folder, self.config.search
        scratch = folder / ".scratch"
        way_out = "Raise search.timeout_s, with search.retry=[timeout]."

        def log(number: int) -> Path:
            return folder / f"shared_{number}.log"

        with (
            scratch_folder(scratch),
            closing(ForkServers(trial.prepare, trial.work, log, self._prepare_s, way_out)) as servers,
        ):
            machine, metric = self._see(servers, scratch)
            file = self._file(machine, metric)
            if earlier is not None and self.is_grid:
                _check_same(earlier, file, self._another())
            retry = [status.value for status in options.retry]
            self._ledger = ledger = SearchLedger(folder, file, retry, self.screen)
            gpus = visible(os.environ, machine.num_gpus)
            needs = num_gpus(self.base, gpus)
            points = self._points(ledger, metric, parallel=max(1, len(gpus) // max(1, needs)))
            ledger.file.write(folder)
            ledger.say_what_changed()
            self._say_begin(ledger)
            until_s = math.inf if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes
            if self.cluster is not None:
                servers.close()  # what it has to say was heard, and not all that a cluster's library does can be forked
                self._hand_over(self.cluster, points, ledger, scratch, until_s)
            elif self.launch is not None:
                self._launch(points, ledger, self.launch)
            else:
                slots, said = Slots(gpus, wellfed.process.CPUS_AT_START), self._said(points)
                pool = TrialPool(servers, slots, self._limit_s, open_trial_folder, ledger.write_if_new, said)
                self._serve(pool, points, ledger, gpus, until_s)

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

    def _see(self, servers: ForkServers, scratch: Path) -> tuple[MachineSeen, MetricSeen]:
        """What trials run on and are ranked by.

        Raises:
            ConfigError: no data and model could be made; the fault of the first.
        """
        first: ConfigError | None = None
        for probe in self._probes:
            try:
                machine, metric = self._seen(probe.config, servers, scratch)
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

    def _seen(self, config: RunConfig, servers: ForkServers, scratch: Path) -> tuple[MachineSeen, MetricSeen]:
        """By the data and model of one point."""
        try:
            if MAY_FORK:
                server = servers.get(shared_key(config), config)
                answers = server.ask(Job("metric", scratch, SeeMetric(config)), servers.timeout_s)
            else:
                import torch

                from wellfed.study.trials import trial

                shared = trial.prepare(config)
                torch.set_num_threads(shared.num_threads)
                answers = tuple(trial.see_metric(shared.parts, config))
        except (ForkServerFailed, DataError) as failed:
            raise ConfigError.of("data and model", str(failed), "") from failed
        if len(answers) != 2:
            raise ConfigError.of("data and model", "could not be looked at.", f"See the files in {scratch.parent}.")
        machine, metric = answers
        return machine, metric

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
            machine="" if self.cluster is not None else machine.description,
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

    def _serve(
        self, pool: TrialPool, points: Points, ledger: SearchLedger, gpus: Sequence[str], until_s: float
    ) -> None:
        def more() -> QueuedTrial | None:
            while time.monotonic() < until_s and (proposal := points.next()) is not None:
                queued = self._queued(proposal, points, ledger, gpus)
                if queued is not None:
                    return queued
            return None

        try:
            for finished in pool.run(more=more, needs=num_gpus(self.base, gpus)):
                proposal, row = self._begun.pop(finished.trial.key)
                self._ended(proposal, row_of_training(finished, row, ledger.folder, ledger.file), points, ledger)
        except _Hopeless as hopeless:
            self.screen.say(str(hopeless))
            return
        if time.monotonic() >= until_s and points.has_more:
            self._say_over()

    def _hand_over(self, cluster: Cluster, points: Points, ledger: SearchLedger, scratch: Path, until_s: float) -> None:
        """A grid's trials to other machines."""

        def tick() -> None:
            ledger.write_if_new()
            if time.monotonic() >= until_s:
                cluster.start_no_more()

        if not points.has_more:
            return
        elsewhere = TrialsElsewhere(cluster, ledger.folder, self.stop, self.screen.say, tick, "search")
        alive = scratch / f"alive_{os.getpid()}_{time.time_ns()}"
        with elsewhere.reached(alive, ledger.file.code, self._limit_s, self._prepare_s):
            left: dict[str, Proposal] = {}
            trials = []
            try:
                while (proposal := points.next()) is not None:
                    if (trial := self._order(proposal, points, ledger, elsewhere)) is not None:
                        left[proposal.point.id] = proposal
                        trials.append(trial)
                for trial, row in elsewhere.run(trials):
                    proposal = left.pop(trial.row.point)
                    if row is not None:
                        assert isinstance(row, SearchRow)
                        ledger.forget_curve(row.folder)
                        self._ended(proposal, row, points, ledger)
            except _Hopeless as hopeless:
                self.screen.say(str(hopeless))
                return
        if time.monotonic() >= until_s and left:
            self._say_over()

    def _order(
        self, proposal: Proposal, points: Points, ledger: SearchLedger, elsewhere: TrialsElsewhere
    ) -> TrialOrder | None:
        """None: the point can't be run there, which is its row."""
        composed = self._composed_point(proposal, points, ledger)
        if composed is None:
            return None
        if (problem := elsewhere.misfit(composed)) is not None:
            self._refuse(proposal, "infeasible", problem, points, ledger)
            return None
        row = replace(ledger.begin(proposal.point, proposal.number), host="")
        return TrialOrder(RunPoint(proposal.point, composed), row, ledger.file)

    def _say_over(self) -> None:
        limit = f"search.max_minutes={self.config.search.max_minutes:g}"
        self.screen.say(f"{limit} are over. {self.asked.way_on} goes on, for as long again.")

    def _queued(
        self, proposal: Proposal, points: Points, ledger: SearchLedger, gpus: Sequence[str]
    ) -> QueuedTrial | None:
        """None: the point does not compose, which is its row."""
        composed, point = self._composed_point(proposal, points, ledger), proposal.point
        if composed is None:
            return None
        ledger.forget_curve(point.id)
        self._begun[point.id] = proposal, ledger.begin(point, proposal.number)
        self.screen.began(proposal.number, point.values)
        asks = self.config.search.pruner is not SearchPruner.none
        return whole_training(point.id, composed, ledger.folder, gpus, asks=asks)

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

    def _said(self, points: Points) -> Callable[[QueuedTrial, Any], str | None]:
        def reply(trial: QueuedTrial, said: Validated) -> str | None:
            proposal, _ = self._begun[trial.key]
            return points.judge(proposal, said.number, said.value)

        return reply

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

    def _launch(self, points: Points, ledger: SearchLedger, launch: Launch) -> None:
        """A grid's trials by Hydra's own means, told when all have ended."""
        proposals = []
        while (proposal := points.next()) is not None:
            if self._composed_point(proposal, points, ledger) is not None:
                proposals.append(proposal)
        jobs = []
        for proposal in proposals:
            open_trial_folder(ledger.folder / proposal.point.id)
            where = assigned("hydra.sweep.dir", str(ledger.folder.absolute()))
            jobs.append([*proposal.point.overrides, where, f"hydra.sweep.subdir={proposal.point.id}"])
        if jobs:
            launch(jobs)
        for proposal in proposals:
            row = ledger.adopt(proposal.point, proposal.number)
            if row is None:
                ledger.refuse(proposal.point, proposal.number, "failed", "left no complete record")
            else:
                self.screen.ended(row, proposal.point.values, ledger.file.metric, ledger.best())
