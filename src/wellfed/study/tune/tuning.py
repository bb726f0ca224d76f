"""Runs ``python src/tune.py``: measures the start, then what the search proposes, then start and result in turns.

`walk` decides what is tried; `turns` measures it, `written_experiment` writes what was found.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellfed import project
from wellfed.command_line import announce, command, set_arguments, typed_arguments
from wellfed.config.compose import Composed, compose_as
from wellfed.config.schema import RunConfig, TuneRunConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError, WellfedError
from wellfed.masking import masked_override
from wellfed.observe.hardware.detect import machine
from wellfed.plan.device import plan_device
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of
from wellfed.record.entries import RunRecord
from wellfed.study.board import step_table
from wellfed.study.executors.local import LocalExecutor, prepare_to_fork
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Kept, Row
from wellfed.study.study import Study, StudyScreen, Trials, scratch_folder
from wellfed.study.study_files import TuneFile, study_code
from wellfed.study.tune.moves import TuneMachine
from wellfed.study.tune.start import of_the_start, of_trials
from wellfed.study.tune.trial import Change, TuneTrial
from wellfed.study.tune.turns import TuneTrials
from wellfed.study.tune.walk import Step, Walk
from wellfed.study.tune.written_experiment import TuneExperiment, name_of
from wellfed.study.tune_gain import TuneGain, TurnsMeasured, gain_in_turns
from wellfed.units import counted, show_duration, show_line

_LEAST_ROUNDS = 3
"""Rounds of the comparison after which it may end, as soon as its interval shows which is better."""


def tune(composed: Composed[TuneRunConfig]) -> int:
    """Runs a tune; returns the exit code.

    Raises:
        WellfedError: nothing was run, or the start can't be measured.
    """
    stop = StopRequest()
    try:
        with stop.listening():
            return _study(composed, stop).go()
    except (Stopped, KeyboardInterrupt):  # before anything was measured
        return exit_code_of(stop.signum or signal.SIGINT)


def _study(composed: Composed[TuneRunConfig], stop: StopRequest) -> TuneStudy:
    """Returns the tune that a command asks for, checked."""
    start: Composed[RunConfig] = compose_as(composed.flags, of_the_start(composed.overrides))
    config = start.config
    if not MAY_FORK:
        problem = "starts trials by forking, which this system does not offer."
        raise ConfigError.of(command("tune"), problem, "Run it on Linux; a container will do.")
    prepare_to_fork(config)
    facts = machine()
    on_gpu = plan_device(config, start.choices, facts).on_gpu
    name = composed.config.tune.name or name_of(config, facts, on_gpu=on_gpu)
    experiment = TuneExperiment(name, composed.config.tune, start, start.flags)
    experiment.check()
    # Lightning starts the other ranks of a trial by this process's command line.
    set_arguments(typed_arguments(), script=project.sources() / "train.py")
    file = TuneFile(
        name=name,
        workload=config.workload.name,
        sample_unit=config.workload.sample_unit,
        start=tuple(map(masked_override, start.overrides)),
        trial_steps=config.sweep.trial_steps,
        code=study_code(),
        machine=f"{facts.cpu}, {facts.cpu_quota_cores:g} cores; "
        + (", ".join(gpu.name for gpu in facts.training_gpus) or "no GPU"),
        flags=tuple(map(masked_override, start.flags)),
    )
    screen = TuneScreen(SAMPLES_PER_S, sample_unit=file.sample_unit)
    folder = Path(config.paths.log_dir) / config.workload.name / "tunes" / name
    asked, around = composed.config.tune, TuneMachine(facts.cpu_quota_cores, on_gpu)
    search = Walk(asked.max_trials, 60 * asked.max_minutes, around)
    return TuneStudy(folder, screen, composed.config, start, file, experiment, search, stop=stop)


class TuneScreen(StudyScreen):
    """A line for each trial, when it is compared with the best."""

    def refused(self, row: Row) -> None:
        """Shows nothing: the step's line has the reason."""

    def ended(self, row: Row, best: Row | None) -> None:
        """Shows nothing: the step's line has the figure."""

    def step(self, number: int, step: Step) -> None:
        """Shows a trial that was compared with the best."""
        shown = [] if step.figure is None else [self.objective.show(step.figure, self.sample_unit)]
        if step.before is not None:
            shown.append(f"{'kept' if step.is_kept else 'dropped'}: {show_line(step.why)}")
        elif not step.is_kept:
            shown.append(show_line(step.why))
        turned = " ".join(step.change.turned) or "the start"
        self.say(f"{number}. {turned}: {', '.join([*shown, show_duration(step.trial.row.seconds)])}")
        if step.change.turned:
            self.say(f"   {show_line(step.change.because)}")


@dataclass
class TuneStudy(Study):
    """One command of a tune."""

    config: TuneRunConfig
    start: Composed[RunConfig]
    file: TuneFile
    experiment: TuneExperiment
    search: Walk
    screen: TuneScreen
    measured: TuneTrials | None = field(default=None, init=False)
    """Measures the configurations; there once the tune runs."""
    _comparison: TurnsMeasured | None = field(default=None, init=False)

    def run(self) -> None:
        """Measures the start, then what the search proposes, then start and result in turns."""
        kept = self._begin()
        announce("Tuning: importing PyTorch, reading data, building the model")

        def compose_point(overrides: Sequence[str], folder: Path) -> Composed[RunConfig]:
            return replace(compose_as(self.start.flags, overrides), run_dir=folder)

        with scratch_folder(self.folder / ".scratch") as scratch:
            settings = self.settings(scratch, self.config.sweep.timeout_s)
            with LocalExecutor(settings) as executor:
                of_all = of_trials(self.start.overrides, self.start.config)
                self.trials = trials = Trials(kept, self.screen, compose_point)
                self.measured = TuneTrials(of_all, trials, executor)
                self._run_steps(self.measured)
                self._comparison = self._compare(self.measured)

    def _begin(self) -> Kept:
        """Returns the rows of what was measured alike before."""
        say, config = self.screen.say, self.config.tune
        kept = Kept(self.folder, SAMPLES_PER_S, self.file.code, self.config.sweep.retry)
        if kept.found.rows:
            if changed := self.file.differs_from_earlier(self.folder):
                say(f"Measured anew, since {', '.join(changed)}; what was measured before is in {kept.set_aside()}.")
            else:
                say(f"Going on in {self.folder}: what it has measured is not measured again.")
        self.file.write(self.folder)
        say(
            f"Tuning {self.file.workload} on {self.file.machine}: at most "
            f"{counted(config.max_trials, 'trial')} and {show_duration(60 * config.max_minutes)}, then "
            f"{counted(config.rounds, 'round')} of start and result in turn. What looks better is measured "
            f"again, to learn the noise between runs. In {self.folder}"
        )
        return kept

    def _run_steps(self, trials: TuneTrials) -> None:
        """Runs trials until the search proposes nothing more."""
        search = self.search

        def again(change: Change, number: int) -> TuneTrial:
            self.screen.say(f"Measured again, against noise: {' '.join(change.turned) or 'the start'}")
            return trials.measure_again(change, number)

        while (change := search.next()) is not None:
            step = search.judge(change, trials.measure(change), again)
            self.screen.step(len(search.steps), step)
            self._write(status="running")
        if search.best is None:
            self._write(status="stopped")
            raise self._start_failed(search.steps[0].trial.row)

    def _start_failed(self, row: Row) -> WellfedError:
        """Returns the error, with the exit code of its trial; without one, or after a signal, the kind decides."""
        error = row.error or {"kind": "code", "message": SAMPLES_PER_S.missing, "advice": ""}
        message = f"{error['message']} {error['advice'] or ''}".strip()
        if row.status == "timeout":
            message += f" Or measure fewer steps: sweep.trial_steps={max(1, self.file.trial_steps // 4)}."
        if row.folder and row.status != "invalid":
            message += f"\nIts folder: {self.folder / row.folder}"
        typed = f"{command('train')} {shlex.join(self.file.arguments(self.file.start))}"
        failed = WellfedError(
            f"The start can't be measured, so there is nothing to tune ({row.status}): {message}\nIt is: {typed}"
        )
        failed.kind = error["kind"]
        failed.exit_code = row.exit_code if row.exit_code is not None and row.exit_code > 0 else None
        return failed

    def _compare(self, trials: TuneTrials) -> TurnsMeasured | None:
        """Measures start and result in turns; None where the start is the result."""
        result, start = self.search.best, self.search.steps[0]
        assert result is not None
        if not result.change.overrides:
            return None
        rounds, overrides = self.config.tune.rounds, result.change.overrides
        about = show_duration(rounds * (start.trial.row.seconds + result.trial.row.seconds))
        self.screen.say(f"Measuring start and result again, at most {counted(rounds, 'round')} in turn: about {about}")
        before: list[float | None] = []
        after: list[float | None] = []
        seconds, problem, gain = 0.0, None, None
        for number in range(1, rounds + 1):
            pair = [TuneTrial(row, RunRecord(row.point)) for row in trials.round_of(overrides, number)]
            before.append(pair[0].figure)
            after.append(pair[1].figure)
            seconds += sum(trial.row.seconds for trial in pair)
            gain = gain_in_turns(before, after)
            for name, trial in zip(("start", "result"), pair, strict=True):
                if trial.figure is None and problem is None:
                    problem = f"The {name} did not end well in round {number}: {trial.problem}"
            if after[-1] is None or (number >= _LEAST_ROUNDS and gain is not None and gain.is_told):
                break
        return TurnsMeasured(before, after, gain, seconds, problem)

    def finish(self) -> int:
        """Writes and shows what was found; returns the exit code."""
        search, comparison, measured = self.search, self._comparison, self.measured
        assert measured is not None
        gain = None if comparison is None else comparison.gain
        result = search.best if comparison is None or comparison.result_holds else search.steps[0]
        assert result is not None
        trial = measured.latest(result.change)
        heading = self._heading(trial.row, gain if result.change.overrides else None)
        written = self.experiment.write(result, search.steps, gain, trial.record, heading)
        self._write(
            status="done",
            result=tuple(result.change.overrides),
            comparison=comparison,
            advice=search.advice,
            written=None if written.file is None else str(written.file),
            why_not=written.why_not,
            use=tuple(map(masked_override, written.use)),
            unproven=tuple(map(masked_override, written.unproven)),
        )
        step_table.show(self.screen.console, self.file)
        return EXIT_FAILED if written.has_failed else EXIT_OK

    def _heading(self, row: Row, gain: TuneGain | None) -> str:
        """Returns the heading of the experiment; ``gain`` is that of their content, None = they hold the start."""
        figure = SAMPLES_PER_S(row)
        shown = "" if figure is None else SAMPLES_PER_S.show(figure, self.file.sample_unit)
        message = "the start." if gain is None else step_table.gain_text(gain)
        typed = shlex.join(map(masked_override, self.start.overrides))
        return (
            f"{command('tune')} {typed}\nTrial {self.folder / row.folder} of {row.started_at}\n"
            f"{shown}; {message} On {self.file.machine}."
        )

    def interrupted(self) -> int:
        """Writes what is known of a tune that did not come to its end."""
        with suppress(OSError):
            self._write(status="stopped")
        return EXIT_FAILED

    def _write(self, **known: Any) -> None:
        """Writes what is known by now."""
        search = self.search
        self.file = replace(
            self.file,
            ended_because=search.ended_because,
            steps=[step.to_dict() for step in search.steps],
            trial_seconds=round(search.spent_seconds, 3),
            noise=search.noise_text,
            **known,
        )
        self.file.write(self.folder)
