"""Runs ``python src/tune.py``: measures the start, then what the search proposes, then start and result in turns.

The search itself is `points.guided.tune_search`; `tune_trials` measures, `tune_options` writes what was found.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from wellfed import project
from wellfed.command_line import announce, command, set_words, words
from wellfed.config.compose import Composed, compose
from wellfed.config.entry import places, where_flags
from wellfed.config.schema import RunConfig, TuneRunConfig
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OK, ConfigError, WellfedError
from wellfed.masking import masked_override
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.plan.device import plan_device
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of, without_collections
from wellfed.record import differences, write_atomically
from wellfed.study.energy import check_energy
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.executors.tasks import in_words
from wellfed.study.ledger import Ledger
from wellfed.study.objective import OBJECTIVES
from wellfed.study.points.guided.gain import TuneGain, gain_in_turns
from wellfed.study.points.guided.moves import TuneMachine
from wellfed.study.points.guided.tune_search import TuneSearch
from wellfed.study.points.guided.tune_steps import TuneBudget
from wellfed.study.points.guided.tune_trial import Change, TuneTrial
from wellfed.study.row import Row
from wellfed.study.study import Study, TimedTrials, scratch_folder
from wellfed.study.trial_end import RowMaker
from wellfed.study.tune import tune_file
from wellfed.study.tune.tune_code import tune_code
from wellfed.study.tune.tune_file import TuneFile, TurnsMeasured, steps_of
from wellfed.study.tune.tune_options import TuneOptions, name_of
from wellfed.study.tune.tune_report import PAGE, TuneReport, TuneScreen, gain_in_words
from wellfed.study.tune.tune_trials import TuneTrials, set_aside
from wellfed.study.tune.tune_words import fixed_knobs, of_the_start, of_trials
from wellfed.units import counted, show_duration, show_text

_LOOK_S = 60
"""Seconds that asking for the machine may take."""


def tune(composed: Composed[TuneRunConfig]) -> int:
    """Runs a tune; returns the exit code."""
    stop = StopRequest()
    try:
        with stop.listening():
            return _study(composed, stop).go()
    except WellfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(show_text(str(error)), file=sys.stderr)
        return EXIT_NOTHING_RUN
    except _StartFailedError as failed:
        print(show_text(str(failed)), file=sys.stderr)
        return failed.exit_code
    except (Stopped, KeyboardInterrupt):  # before anything was measured
        return exit_code_of(stop.signum or signal.SIGINT)


def _study(composed: Composed[TuneRunConfig], stop: StopRequest) -> TuneStudy:
    """Returns the tune that a command asks for, checked."""
    start = _start(composed)
    config = start.config
    fixed = fixed_knobs(composed.config.tune.fixed)
    if not MAY_FORK:
        problem = "starts trials by forking, which this system does not offer."
        raise ConfigError.of(command("tune"), problem, "Run it on Linux; a container will do.")
    check_energy(config, ())
    prepare_to_fork(config)
    announce("Tuning: importing PyTorch")
    facts = _machine()
    on_gpu = plan_device(config, start.choices, facts).on_gpu
    name = composed.config.tune.name or name_of(config, facts, on_gpu=on_gpu)
    options = TuneOptions(name, composed.config.tune, start, places(words()), where_flags(words()))
    options.check()
    # Lightning starts the other ranks of a trial by this process's command line.
    set_words(words(), script=project.sources() / "train.py")
    file = TuneFile(
        name=name,
        workload=config.workload.name,
        sample_unit=config.workload.sample_unit,
        start=tuple(map(masked_override, start.overrides)),
        objective=config.sweep.objective.value,
        trial_steps=config.sweep.trial_steps,
        code=tune_code(options.config_dirs, start.choices, name),
        machine=in_words(facts),
        flags=tuple(where_flags(words())),
    )
    screen = TuneScreen(OBJECTIVES[file.objective], sample_unit=file.sample_unit)
    folder = Path(config.paths.log_dir) / config.workload.name / "tunes" / name
    budget = TuneBudget(composed.config.tune.max_trials, 60 * composed.config.tune.max_minutes)
    search = TuneSearch(screen.objective, budget, TuneMachine(facts.cpu_quota_cores, on_gpu), fixed)
    return TuneStudy(folder, screen, stop, composed.config, start, file, options, search)


def _start(composed: Composed[Any]) -> Composed[RunConfig]:
    """Returns what `python src/train.py` would run.

    Raises:
        ConfigError: that is another configuration than the one composed for the tune.
    """
    start: Composed[RunConfig] = compose(of_the_start(composed.overrides), "train", **places(words()))
    here = {key: value for key, value in composed.resolved.items() if key != "tune"}
    if found := differences(start.resolved, here):
        knob, there, own = found[0]
        problem = f"is {own} by the primary configuration of tune, and {there} by train.yaml, which trials are made by."
        raise ConfigError.of(knob, problem, f"Write it into train.yaml, or type {knob}={own}.")
    return start


def _machine() -> MachineFacts:
    """Returns this machine as a run sees it; a child process asks torch, since this process must not start CUDA."""
    with without_collections():
        import wellfed.study.executors.trial_work  # noqa: F401  imported before the forks, for all of them

    def look(_: None, __: None) -> Iterator[MachineFacts]:
        from wellfed.observe.hardware.torch_cuda import torch_cuda

        yield machine(torch_cuda())

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with closing(ForkServer(lambda: None, look, folder / "log")) as server:
            try:
                server.wait_ready(_LOOK_S)
                answers = server.ask(Job("machine", folder), _LOOK_S)
            except ForkServerFailed:
                answers = ()
    return answers[0] if answers else machine()


class _StartFailedError(Exception):
    """Raised when the start could not be measured."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Exit code of a run of the start."""


@dataclass
class TuneStudy(Study):
    """One command of a tune."""

    config: TuneRunConfig
    start: Composed[RunConfig]
    file: TuneFile
    options: TuneOptions
    search: TuneSearch
    screen: TuneScreen
    _trials: TuneTrials | None = field(default=None, init=False)
    _comparison: TurnsMeasured | None = field(default=None, init=False)
    _beside_s: dict[tuple[str, ...], float] = field(default_factory=dict, init=False)
    """Seconds that an earlier command needed beside each trial, by its overrides."""

    @property
    def trials(self) -> TuneTrials:
        """Trials of the tune; there once it runs."""
        assert self._trials is not None
        return self._trials

    @property
    def has_nothing(self) -> bool:
        """Whether nothing was measured yet."""
        return self._trials is None or self._trials.ledger.is_empty

    def go(self) -> int:
        """Runs the tune in its folder; returns the exit code."""
        is_new = not self.folder.exists()
        try:
            return super().go()
        except _StartFailedError as failed:
            if is_new and failed.exit_code == EXIT_NOTHING_RUN:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def run(self) -> None:
        """Measures the start, then what the search proposes, then start and result in turns."""
        extra, objective = places(words()), self.search.objective
        retry = [status.value for status in self.config.sweep.retry]
        kept = Ledger(self.folder, self.screen, objective, self.file.code, retry, keeps_code=True)
        self._begin(kept)

        def compose_point(overrides: Sequence[str], folder: Path) -> Composed[RunConfig]:
            return replace(compose(overrides, "train", **extra), run_dir=folder)

        with scratch_folder(self.folder / ".scratch") as scratch:
            settings = self.settings(scratch, self.config.sweep.timeout_s, self.file.code, RowMaker())
            with LocalExecutor(settings) as executor:
                of_all = of_trials(self.start.overrides, self.start.config)
                self._trials = TuneTrials(of_all, TimedTrials(kept, self.screen, compose_point), executor)
                if left := self._trials.kept_as_they_are():
                    listed = ", ".join(f"{number} {status}" for status, number in left.items())
                    self.screen.say(f"Kept as they are: {listed}; sweep.retry=[{','.join(left)}] runs them again.")
                self._seek(self._trials)
                self._comparison = self._compare(self._trials)

    def _begin(self, kept: Ledger) -> None:
        """Goes on with what was measured alike before, and moves the rest aside."""
        say, config = self.screen.say, self.config.tune
        earlier = tune_file.read(self.folder)
        if not kept.is_empty:
            if changed := ["what it was asked can't be read"] if earlier is None else self.file.differs_from(earlier):
                aside = set_aside(kept)
                say(f"Measured anew, since {', '.join(changed)}; what was measured before is in {self.folder / aside}.")
            else:
                self._beside_s = tune_file.beside_of(earlier or {"steps": ()})
                say(f"Going on in {self.folder}: what it has measured is not measured again.")
        self.file.write(self.folder)
        say(
            f"Tuning {self.file.workload} on {self.file.machine}, for {self.search.objective.title.lower()}: at most "
            f"{config.max_trials} trials and {config.max_minutes:g} minutes, then {config.rounds} rounds of start and "
            f"result in turn. What looks better is measured again, to learn the noise between runs. In {self.folder}"
        )

    def _seek(self, trials: TuneTrials) -> None:
        """Runs trials until the search proposes nothing more."""
        search = self.search

        def again(change: Change, number: int) -> TuneTrial:
            self.screen.say(f"Measured again, against noise: {' '.join(change.turned) or 'the start'}")
            row = trials.measure_again(change.overrides, number)
            return TuneTrial.of(row, trials.record(row), self.search.objective)

        search.again = again
        while (change := self._proposed()) is not None:
            began_at_s = time.monotonic()
            row = trials.measure(change.overrides)
            # A trial of an earlier command takes no time now, and counts as it did then.
            beside_s = max(time.monotonic() - began_at_s - row.seconds, self._beside_s.get(change.overrides, 0.0))
            trial = replace(TuneTrial.of(row, trials.record(row), self.search.objective), beside_seconds=beside_s)
            step = search.tell(change, trial)
            self.screen.step(len(search.steps), step)
            self._write(status="running")
        if search.best is None:
            self._write(status="stopped")
            raise self._start_failed(trials.latest(()))

    def _proposed(self) -> Change | None:
        """Returns the next change; reports it if the search goes on with a change that it had dropped."""
        search, before = self.search, self.search.best
        change = search.propose()
        if before is not None and search.best is not None and search.best is not before:
            self.screen.goes_on(search.steps.index(search.best) + 1, search.best)
        return change

    def _start_failed(self, row: Row) -> _StartFailedError:
        error = row.error or {"kind": "code", "message": self.search.objective.missing, "advice": ""}
        told = f"{error.get('message', '')} {error.get('advice') or ''}".strip()
        nothing_run = row.exit_code is None and error.get("kind") in ("config", "data")
        code = EXIT_NOTHING_RUN if nothing_run else row.exit_code
        if row.status == "timeout":
            told += f" Or measure fewer steps: sweep.trial_steps={max(1, self.file.trial_steps // 4)}."
        if not nothing_run and row.folder:
            told += f"\nIts folder: {self.folder / row.folder}"
        retried = " ".join([command("train"), *map(masked_override, self.start.overrides)])
        message = f"The start can't be measured, so there is nothing to tune ({row.status}): {told}\nIt is: {retried}"
        return _StartFailedError(message, code if code is not None and code > 0 else EXIT_FAILED)

    def _compare(self, trials: TuneTrials) -> TurnsMeasured | None:
        """Measures start and result in turns; None where the start is the result."""
        best = self.search.best
        assert best is not None
        if not best.change.overrides:
            return None
        rounds, start = self.config.tune.rounds, self.search.start
        assert start is not None
        if missing := trials.rounds_missing(best.change.overrides, rounds):
            about = show_duration(missing * (start.trial.seconds + best.trial.seconds))
            self.screen.say(f"Measuring start and result again, {counted(missing, 'round')} in turn: about {about}")
        rows = trials.compare(best.change.overrides, rounds)
        pairs = [tuple(TuneTrial.of(row, None, self.search.objective) for row in round_) for round_ in rows]
        before, after = [first.figure for first, _ in pairs], [second.figure for _, second in pairs]
        problems = [
            f"The {name} did not end well in round {number}: {trial.status}, {trial.error}"
            for number, pair in enumerate(pairs, 1)
            for name, trial in zip(("start", "result"), pair, strict=True)
            if trial.figure is None
        ]
        seconds = sum(trial.seconds for pair in pairs for trial in pair)
        gain = gain_in_turns(before, after, self.search.objective)
        return TurnsMeasured(before, after, gain, seconds, problems[0] if problems else None)

    def finish(self) -> int:
        """Writes and shows what was found; returns the exit code."""
        search, comparison, trials = self.search, self._comparison, self.trials
        best, start = search.best, search.start
        assert best is not None
        assert start is not None
        if (too_little := self._too_little()) is not None:
            self.interrupted()
            self.screen.say(f"Stopped. {too_little}")
            return EXIT_FAILED
        gain = None if comparison is None else comparison.gain
        result = best if comparison is None or comparison.result_holds else start
        row = trials.latest(result.change.overrides)
        kept = [step for step in search.steps if step.is_kept]
        heading = self._heading(row, gain if result.change.overrides else None)
        written = self.options.write(result, kept, gain, trials.record(row), heading)
        self._write(
            status="done",
            result=tuple(result.change.overrides),
            comparison=comparison,
            advice=[asdict(each) for each in search.advice],
            written=tuple(map(str, written.files)),
            use=tuple(map(masked_override, written.use)),
            unproven=tuple(map(masked_override, written.unproven)),
        )
        report = TuneReport(self.file, search, result, comparison, written)
        write_atomically(self.folder / PAGE, report.page())
        for line in report.lines():
            self.screen.say(line)
        return EXIT_FAILED if written.has_failed else EXIT_OK

    def _too_little(self) -> str | None:
        """Returns a message if the budget ended with the start's trial."""
        minutes, took_s = self.config.tune.max_minutes, self.search.spent_seconds
        around_s = self.search.used_seconds - took_s
        if len(self.search.steps) > 1 or 2 * took_s + around_s <= 60 * minutes:
            return None
        enough = math.ceil((6 * took_s + around_s) / 60)  # half a dozen trials
        return (
            f"tune.max_minutes={minutes:g} leaves no time for a trial beside that of the start, which took "
            f"{show_duration(took_s)} after {show_duration(around_s)} of preparing: nothing was tried. Set "
            f"tune.max_minutes={enough}."
        )

    def _heading(self, row: Row, gain: TuneGain | None) -> str:
        """Returns the heading of the option files; ``gain`` is that of their content, None = they hold the start."""
        figure = self.search.objective(row)
        shown = "" if figure is None else self.search.objective.show(figure, self.file.sample_unit)
        told = "the start." if gain is None else gain_in_words(gain, self.search.objective)
        typed = shlex.join(map(masked_override, self.start.overrides))
        return (
            f"{command('tune')} {typed}\nTrial {self.folder / row.folder} of {row.started_at}\n"
            f"{shown}; {told} On {self.file.machine}."
        )

    def interrupted(self) -> int:
        """Writes what is known of a tune that did not come to its end."""
        with contextlib.suppress(OSError):
            self._write(status="stopped")
        return EXIT_FAILED

    def says_stopped(self) -> str:
        """Returns the message after a signal."""
        return f"Stopped. {self.way_on} again goes on."

    def _write(self, **known: Any) -> None:
        """Writes what is known by now."""
        search = self.search
        self.file = replace(
            self.file,
            ended_because=search.ended_because,
            steps=steps_of(search),
            trial_seconds=round(search.spent_seconds, 3),
            **known,
        )
        self.file.write(self.folder)
