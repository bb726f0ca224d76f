"""Runs ``python src/tune.py``: measures the start, then what the search proposes, then start and result in turn.

Each trial is a process of its own, as in a sweep; the search itself is the room ``tune``. The order of things is here;
`tune_trials` measures, `tune_options` writes what was found.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellfed import project
from wellfed.command_line import command, set_words, words
from wellfed.config.compose import Composed, compose
from wellfed.config.entry import places, where_flags
from wellfed.config.schema import RunConfig, TuneRunConfig
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OK, ConfigError, WellfedError
from wellfed.masking import masked_override
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.plan.device import plan_device
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of
from wellfed.record import differences, write_atomically
from wellfed.run.folder.lock import made, only_one
from wellfed.run.ranks.announce import announce
from wellfed.study.executors.executor import StudySettings, row_of_end
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.executors.tasks import in_words
from wellfed.study.sweep.objective import OBJECTIVES
from wellfed.study.trials.energy import check_energy
from wellfed.study.trials.trial_setup import TrialSetup, scratch_folder
from wellfed.study.trials.tune_code import tune_code
from wellfed.study.trials.tune_options import TuneOptions, name_of
from wellfed.study.trials.tune_report import PAGE, TuneReport
from wellfed.study.trials.tune_screen import TuneScreen
from wellfed.study.trials.tune_trials import TuneLedger, TuneTrials
from wellfed.study.trials.tune_words import fixed_knobs, of_the_start, of_trials
from wellfed.study.tune import tune_file
from wellfed.study.tune.gain import TuneGain, gain_in_turns
from wellfed.study.tune.moves import TuneMachine
from wellfed.study.tune.search import TuneBudget, TuneSearch
from wellfed.study.tune.tune_file import TuneFile, TurnsMeasured, steps_of
from wellfed.study.tune.tune_table import gain_in_words
from wellfed.study.tune.tune_trial import Change, Trial
from wellfed.units import counted, show_duration, show_text

if TYPE_CHECKING:
    from wellfed.study.sweep.ledger import Row

_LOOK_S = 60
"""That looking at the machine may take."""


def tune(composed: Composed[TuneRunConfig]) -> int:
    """All of it; the exit code."""
    stop = StopRequest()
    try:
        with stop.listening():
            return _tune(composed, stop)
    except WellfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(show_text(str(error)), file=sys.stderr)
        return EXIT_NOTHING_RUN
    except (Stopped, KeyboardInterrupt):  # before anything was measured
        return _stopped(stop)


def _stopped(stop: StopRequest) -> int:
    return exit_code_of(stop.signum or signal.SIGINT)


def _tune(composed: Composed[TuneRunConfig], stop: StopRequest) -> int:
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
    folder = Path(config.paths.log_dir) / config.workload.name / "tunes" / name
    is_new = not folder.exists()
    with only_one(made(folder)):
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
        around = TuneMachine(facts.cpu_quota_cores, on_gpu)
        run = _Tune(composed.config, start, folder, file, options, around, fixed, stop)
        try:
            return run.go()
        except (Stopped, KeyboardInterrupt):
            stop.is_finishing = True  # an impatient second signal must not become a traceback
            run.stopped("The same command again goes on.")
            return _stopped(stop)
        except _NotTheStart as refused:
            print(show_text(str(refused)), file=sys.stderr)
            if is_new and refused.exit_code == EXIT_NOTHING_RUN:
                shutil.rmtree(folder, ignore_errors=True)
            return refused.exit_code
        except ConfigError:
            if is_new and run.has_nothing:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as error:  # a disk that is full, above all
            where = f" ({error.filename})" if error.filename else ""
            run.stopped(f"{error.strerror or error}{where}. Make room, then the same command goes on.")
            return EXIT_FAILED


def _start(composed: Composed[Any]) -> Composed[RunConfig]:
    """What `python src/train.py` would run.

    Raises:
        ConfigError: that is another configuration than the one that was composed for the tune.
    """
    start: Composed[RunConfig] = compose(of_the_start(composed.overrides), "train", **places(words()))
    here = {key: value for key, value in composed.resolved.items() if key != "tune"}
    if found := differences(start.resolved, here):
        knob, there, own = found[0]
        problem = f"is {own} by the primary configuration of tune, and {there} by train.yaml, which trials are made by."
        raise ConfigError.of(knob, problem, f"Write it into train.yaml, or type {knob}={own}.")
    return start


def _machine() -> MachineFacts:
    """This machine as a run sees it, torch included: asked in a process of its own, since this one must not touch
    CUDA."""
    import wellfed.study.executors.trial_work  # noqa: F401  what all processes forked from here need

    def look(_: None, __: None) -> Iterator[MachineFacts]:
        from wellfed.observe.hardware.torch_cuda import torch_cuda

        yield machine(torch_cuda())

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with closing(ForkServer(lambda: None, look, place / "log")) as server:
            try:
                server.wait_ready(_LOOK_S)
                answers = server.ask(Job("machine", place), _LOOK_S)
            except ForkServerFailed:
                answers = ()
    return answers[0] if answers else machine()


class _NotTheStart(Exception):
    """The start could not be measured."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """As a run of it would have had."""


@dataclass
class _Tune:
    """One tune in its folder, which nobody else writes to."""

    config: TuneRunConfig
    start: Composed[RunConfig]
    folder: Path
    file: TuneFile
    options: TuneOptions
    around: TuneMachine
    fixed: frozenset[str]
    stop: StopRequest

    def __post_init__(self) -> None:
        self._objective = OBJECTIVES[self.file.objective]
        self._screen = TuneScreen(self._objective, self.file.sample_unit)
        budget = TuneBudget(self.config.tune.max_trials, 60 * self.config.tune.max_minutes)
        self._search = TuneSearch(self._objective, budget, self.around, self.fixed)
        retry = [status.value for status in self.config.sweep.retry]
        self._beside_s: dict[tuple[str, ...], float] = {}
        self._ledger = TuneLedger(self.folder, self.file.code, self._screen, retry)

    @property
    def has_nothing(self) -> bool:
        """Nothing was measured yet."""
        return self._ledger.is_empty

    def go(self) -> int:
        """All of it; the exit code."""
        self._begin()
        extra, timeout_s = places(words()), self.config.sweep.timeout_s

        def compose_point(overrides: Sequence[str], folder: Path) -> Composed[RunConfig]:
            return replace(compose(overrides, "train", **extra), run_dir=folder)

        settings = StudySettings(
            folder=self.folder,
            scratch=self.folder / ".scratch",
            timeout_s=timeout_s,
            prepare_s=timeout_s,
            group="sweep",
            code=self.file.code,
            row_of=row_of_end,
            say=self._screen.say,
            tick=self._screen.tick,
            stop=self.stop,
            see_machine=lambda seen: self._ledger.note_machine(seen.description, seen.processor),
        )
        with scratch_folder(settings.scratch), LocalExecutor(settings) as executor:
            of_all = of_trials(self.start.overrides, self.start.config)
            setup = TrialSetup(compose_point, self._ledger, self._screen)
            trials = TuneTrials(of_all, setup, self._ledger, executor)
            if left := trials.kept_as_they_are():
                told = ", ".join(f"{number} {status}" for status, number in left.items())
                self._screen.say(f"Kept as they are: {told}; sweep.retry=[{','.join(left)}] runs them again.")
            self._seek(trials)
            comparison = self._compare(trials)
        return self._end(trials, comparison)

    def _begin(self) -> None:
        """What is there already is gone on with, if it was measured alike."""
        say, config = self._screen.say, self.config.tune
        earlier = tune_file.read(self.folder)
        if not self._ledger.is_empty:
            if changed := ["what it was asked can't be read"] if earlier is None else self.file.differs_from(earlier):
                aside = self._ledger.set_aside()
                say(f"Measured anew, since {', '.join(changed)}; what was measured before is in {self.folder / aside}.")
            else:
                self._beside_s = tune_file.beside_of(earlier or {"steps": ()})
                say(f"Going on in {self.folder}: what it has measured is not measured again.")
        self.file.write(self.folder)
        say(
            f"Tuning {self.file.workload} on {self.file.machine}, for {self._objective.title.lower()}: at most "
            f"{config.max_trials} trials and {config.max_minutes:g} minutes, then {config.rounds} rounds of start and "
            f"result in turn. What looks better is measured again, to learn the noise between runs. In {self.folder}"
        )

    def _seek(self, trials: TuneTrials) -> None:
        """Until the search proposes nothing more."""
        search = self._search

        def again(change: Change, number: int) -> Trial:
            self._screen.say(f"Measured again, against noise: {' '.join(change.turned) or 'the start'}")
            row = trials.measure_again(change.overrides, number)
            return Trial.of(row, trials.record(row), self._objective)

        search.again = again
        while (change := self._proposed()) is not None:
            began_at_s = time.monotonic()
            row = trials.measure(change.overrides)
            # What was measured by an earlier command takes nothing now, and counts as it did then.
            beside_s = max(time.monotonic() - began_at_s - row.seconds, self._beside_s.get(change.overrides, 0.0))
            trial = replace(Trial.of(row, trials.record(row), self._objective), beside_seconds=beside_s)
            step = search.tell(change, trial)
            self._screen.step(len(search.steps), step)
            self._write(status="running")
        if search.best is None:
            self._write(status="stopped")
            raise self._not_the_start(trials.latest(()))

    def _proposed(self) -> Change | None:
        """The next change; said, where the search goes on with what it had dropped."""
        search, before = self._search, self._search.best
        change = search.propose()
        if before is not None and search.best is not None and search.best is not before:
            self._screen.goes_on(search.steps.index(search.best) + 1, search.best)
        return change

    def _not_the_start(self, row: Row) -> _NotTheStart:
        error = row.error or {"kind": "code", "message": self._objective.missing, "advice": ""}
        told = f"{error.get('message', '')} {error.get('advice') or ''}".strip()
        nothing_run = row.exit_code is None and error.get("kind") in ("config", "data")
        code = EXIT_NOTHING_RUN if nothing_run else row.exit_code
        if row.status == "timeout":
            told += f" Or measure fewer steps: sweep.trial_steps={max(1, self.file.trial_steps // 4)}."
        if not nothing_run and row.folder:
            told += f"\nIts folder: {self.folder / row.folder}"
        retried = " ".join([command("train"), *map(masked_override, self.start.overrides)])
        message = f"The start can't be measured, so there is nothing to tune ({row.status}): {told}\nIt is: {retried}"
        return _NotTheStart(message, code if code is not None and code > 0 else EXIT_FAILED)

    def _compare(self, trials: TuneTrials) -> TurnsMeasured | None:
        """Start and result in turn; None where the start is the result."""
        best = self._search.best
        assert best is not None
        if not best.change.overrides:
            return None
        rounds, start = self.config.tune.rounds, self._search.start
        assert start is not None
        if missing := trials.rounds_missing(best.change.overrides, rounds):
            about = show_duration(missing * (start.trial.seconds + best.trial.seconds))
            self._screen.say(f"Measuring start and result again, {counted(missing, 'round')} in turn: about {about}")
        rows = trials.compare(best.change.overrides, rounds)
        pairs = [tuple(Trial.of(row, None, self._objective) for row in round_) for round_ in rows]
        before, after = [first.figure for first, _ in pairs], [second.figure for _, second in pairs]
        problems = [
            f"The {name} did not end well in round {number}: {trial.status}, {trial.error}"
            for number, pair in enumerate(pairs, 1)
            for name, trial in zip(("start", "result"), pair, strict=True)
            if trial.figure is None
        ]
        seconds = sum(trial.seconds for pair in pairs for trial in pair)
        gain = gain_in_turns(before, after, self._objective)
        return TurnsMeasured(before, after, gain, seconds, problems[0] if problems else None)

    def _end(self, trials: TuneTrials, comparison: TurnsMeasured | None) -> int:
        """Say, write and keep what was found; the exit code."""
        search = self._search
        best, start = search.best, search.start
        assert best is not None
        assert start is not None
        if (too_little := self._too_little()) is not None:
            self.stopped(too_little)
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
            self._screen.say(line)
        return EXIT_FAILED if written.has_failed else EXIT_OK

    def _too_little(self) -> str | None:
        """Where the budget has ended with the start's trial."""
        minutes, took_s = self.config.tune.max_minutes, self._search.spent_seconds
        around_s = self._search.used_seconds - took_s
        if len(self._search.steps) > 1 or 2 * took_s + around_s <= 60 * minutes:
            return None
        enough = math.ceil((6 * took_s + around_s) / 60)  # half a dozen trials
        return (
            f"tune.max_minutes={minutes:g} leaves no time for a trial beside that of the start, which took "
            f"{show_duration(took_s)} after {show_duration(around_s)} of preparing: nothing was tried. Set "
            f"tune.max_minutes={enough}."
        )

    def _heading(self, row: Row, gain: TuneGain | None) -> str:
        """Of the files of options; ``gain`` is that of what they hold, None: they hold the start."""
        figure = self._objective(row)
        shown = "" if figure is None else self._objective.show(figure, self.file.sample_unit)
        told = "the start." if gain is None else gain_in_words(gain, self._objective)
        typed = shlex.join(map(masked_override, self.start.overrides))
        return (
            f"{command('tune')} {typed}\nTrial {self.folder / row.folder} of {row.started_at}\n"
            f"{shown}; {told} On {self.file.machine}."
        )

    def stopped(self, why: str) -> None:
        """Something ended it before its end."""
        self._screen.say(f"Stopped. {why}")
        with contextlib.suppress(OSError):
            self._write(status="stopped")

    def _write(self, **known: Any) -> None:
        """What is known by now."""
        search = self._search
        self.file = replace(
            self.file,
            ended_because=search.ended_because,
            steps=steps_of(search),
            trial_seconds=round(search.spent_seconds, 3),
            **known,
        )
        self.file.write(self.folder)
