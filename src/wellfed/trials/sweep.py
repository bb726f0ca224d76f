"""``python src/train.py -m sweep=<option>``: every combination a row of the ledger, then the leaderboard.

All points are composed and planned before the first is run. Each trial is a process of its own; whatever becomes of it
is a row, and the same command again runs what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import wellfed
import wellfed.cpus
from wellfed.config.compose import SECRET_SHOWN, Composed, masked_override
from wellfed.config.entry import where_flags
from wellfed.config.multirun import Multirun
from wellfed.config.override_text import assigned
from wellfed.config.schema import RunConfig
from wellfed.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    ConfigError,
    Fault,
)
from wellfed.forking import MAY_FORK
from wellfed.record import Status
from wellfed.run.lock import only_one
from wellfed.run.train import own_git_state, set_environment
from wellfed.stop_request import Stopped, StopRequest
from wellfed.sweep import leaderboard_files, ledger
from wellfed.sweep.grid import Grid, Point, SweepFile
from wellfed.sweep.leaderboard import leaderboard
from wellfed.sweep.ledger import Row
from wellfed.sweep.rows import code_version, ended_row, recorded_row, refused_row
from wellfed.tracking.wandb import decide_mode
from wellfed.trials.slots import Slots, visible
from wellfed.trials.sweep_screen import SweepScreen
from wellfed.units import counted, show_duration

if TYPE_CHECKING:
    from wellfed.trials.fork_server import Ended, Stem, StemFailed
    from wellfed.trials.preflight import Looks
    from wellfed.trials.trial_pool import Stems, Trial

Launch = Callable[[list[list[str]]], None]
"""Another launcher of Hydra's: runs each list of overrides somewhere, and returns when all have ended."""
CONFIRMED = 3
"""So many of the best are measured again..."""
CONFIRM_ROUNDS = 3
"""...so often, in turn: a machine that slows down slows all of them."""
_GUESSED_TRIAL_S = 5
_MANY = 20
"""Points that take seconds to compose."""
_MAY_BE_RETRIED = ("oom", "failed", "killed", "timeout")
_NAME = re.compile(r"\w[\w.-]*")


def sweep(multirun: Multirun, launch: Launch | None = None) -> int:
    """All of it; 0 if any trial is ok.

    Args:
        launch: None = processes of our own, one a GPU at a time.

    Raises:
        ConfigError: no sweep can be made of this; nothing was run.
    """
    base = multirun.base()
    axes, fixed = multirun.axes()
    if "workload" in axes:
        problem = "is no axis of a sweep: samples/s of different workloads are no comparison."
        way_out = f"Sweep one after the other: workload={axes['workload'][0]}"
        raise ConfigError([Fault(f"workload={','.join(axes['workload'])}", problem, way_out)])
    grid = Grid(axes, fixed)
    folder = _folder(multirun, base)
    _check_size(grid, base, folder)
    if launch is None and not MAY_FORK:
        problem = "starts trials by forking, which this system does not offer."
        raise ConfigError([Fault("hydra/launcher=wellfed", problem, "Add hydra/launcher=basic: all in one process.")])
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder} can't be made: {error.strerror}."
        raise ConfigError([Fault("paths.log_dir", problem, "Name a folder that can be written.")]) from error
    stop = StopRequest()
    with only_one(folder), stop.listening():
        running = _Sweep(multirun, base, grid, folder, launch)
        try:
            return running.go()
        except (Stopped, KeyboardInterrupt):
            stop.is_finishing = True  # an impatient second signal must not become a traceback
            running.interrupted()
            return EXIT_TERMINATED if stop.signum == signal.SIGTERM else EXIT_INTERRUPTED
        except ConfigError:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as error:
            return running.stopped_by(error)


def _folder(multirun: Multirun, base: Composed[RunConfig]) -> Path:
    name = base.config.sweep.name or base.choices["sweep"]
    if not _NAME.fullmatch(name):
        problem = "becomes the name of a folder: letters, digits, '_', '-' and '.'."
        raise ConfigError([Fault(f"sweep.name={name}", problem, "Write sweep.name=my_sweep.")])
    config = base.config
    return multirun.typed_dir or Path(config.paths.log_dir) / config.workload.name / "sweeps" / name


def _check_size(grid: Grid, base: Composed[RunConfig], folder: Path) -> None:
    if not grid.axes:
        way_out = "Name values of one knob at least: loader=baseline,balanced"
        raise ConfigError([Fault(f"sweep={base.choices['sweep']}", "has no axis: nothing varies.", way_out)])
    limit = base.config.sweep.max_trials
    if grid.size <= limit:
        return
    known = [row.seconds for row in ledger.read(folder).rows if row.seconds > 0]
    each_s = median(known) if known else _GUESSED_TRIAL_S
    basis = "as the trials in its ledger took" if known else "a guess"
    axes = " x ".join(f"{len(values):,} of {axis}" for axis, values in grid.axes.items())
    problem = (
        f"{counted(grid.size, 'combination')} ({axes}), and sweep.max_trials={limit}; "
        f"at {show_duration(each_s)} each, {basis}, they take {show_duration(grid.size * each_s)}."
    )
    way_out = f"Name fewer values, or set sweep.max_trials={grid.size}."
    raise ConfigError([Fault(f"sweep={base.choices['sweep']}", problem, way_out)])


@dataclass(frozen=True)
class _Ready:
    """A point that can be run."""

    point: Point
    composed: Composed[RunConfig]
    num_gpus: int | None = None
    """None = not planned; it is then tried on the processor's place."""
    predicted_peak_gib: float | None = None
    seen: Mapping[str, Any] | None = None
    """What need not be found out once more by its trials."""
    keeps_rows: bool = False
    """Feature rows that can be computed for all trials that share them."""
    rows: Path | None = None
    """Where they are."""


class _Sweep:
    """One sweep in its folder, which nobody else writes to."""

    def __init__(
        self, multirun: Multirun, base: Composed[RunConfig], grid: Grid, folder: Path, launch: Launch | None
    ) -> None:
        self._multirun, self._base, self._folder, self._launch = multirun, base, folder, launch
        self._config = base.config.sweep
        self._points = grid.points()
        self._code = code_version(own_git_state())
        self._file = SweepFile(
            name=self._config.name or base.choices["sweep"],
            workload=base.config.workload.name,
            sample_unit=base.config.workload.sample_unit,
            axes={axis: _masked_values(axis, values) for axis, values in grid.axes.items()},
            fixed=tuple(map(masked_override, grid.fixed)),
            ids=tuple(point.id for point in self._points),
            code=self._code,
            machine="",
            trial_steps=self._config.trial_steps,
            flags=tuple(where_flags(sys.argv[1:])),
        )
        self._screen = SweepScreen(folder, self._file.sample_unit, grid.axes)
        self._found = ledger.read(folder)
        self._ready: dict[str, _Ready] = {}
        """Points that compose and, once planned, fit; by id."""
        self._begun: dict[str, Row] = {}
        """By folder."""
        self._gpus: list[str] = []
        self._is_ranked = False
        """All that is to be measured has been, and told."""

    def go(self) -> int:
        """All stages; the exit code."""
        self._say_what_changed()
        self._adopt()
        self._compose()
        if not (self._missing() or self._to_confirm()):
            return self._end()
        prepare_to_fork(self._base.config)
        from wellfed.trials import trial
        from wellfed.trials.preflight import Looks
        from wellfed.trials.trial_pool import Stems

        with (
            Looks(self._folder / ".look", self._config.timeout_s) as looks,
            closing(Stems(trial.prepare, trial.work, self._log, self._config.timeout_s)) as stems,
        ):
            if MAY_FORK:
                self._plan(looks, stems, [*self._missing(), *self._best_ready()])
            self._file.write(self._folder)
            if self._run_missing(stems):
                self._confirm(stems)
        return self._end()

    def _end(self) -> int:
        exit_code = self._finish()
        self._is_ranked = True
        self._publish()
        return exit_code

    def interrupted(self) -> None:
        """What is there is kept."""
        if self._is_ranked:
            self._screen.say("Stopped while putting the trials into wandb. The same command again does the rest.")
            return
        self._finish()
        self._screen.say("Stopped. The same command again runs what is missing.")

    def stopped_by(self, error: OSError) -> int:
        """A disk that is full, above all: what is known is told; the exit code."""
        exit_code = EXIT_FAILED if self._is_ranked else self._finish()
        where = f" ({error.filename})" if error.filename else ""
        self._screen.say(f"Stopped: {error.strerror or error}{where}. Make room, then the same command goes on.")
        return exit_code

    # -- before the first trial -----------------------------------------------------------------------------------

    def _say_what_changed(self) -> None:
        """A ledger that is there already is gone on with; what makes its rows another matter is said."""
        for number in self._found.damaged:
            text = "is cut or no row; its trial runs again unless its own record is whole."
            self._screen.say(f"{ledger.FILE_NAME}: line {number} {text}")
        try:
            earlier = SweepFile.read(self._folder)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._screen.say(f"{error} It is written anew.")
            return
        self._file = replace(self._file, machine=earlier.machine)
        now, before, latest = set(self._file.ids), set(earlier.ids), self._found.latest()
        known = latest.keys()
        if now == before:
            self._screen.say(f"Going on in {self._folder}: {len(now & known)} of {len(now)} points have a row.")
        else:
            self._screen.say(
                f"{self._folder} was made with another grid: {len(now - before)} points are new, {len(now & known)} "
                f"have a row, {len(before - now)} that this grid lacks stay in {ledger.FILE_NAME}."
            )
        again = "To measure them again: sweep.retry=[ok], or another sweep.name."
        measured = [row for point, row in latest.items() if point in now and row.status == "ok"]
        codes = sorted({row.code for row in measured} - {self._code})
        if codes:
            self._screen.say(
                f"The code has changed since ({', '.join(codes)} -> {self._code}): rows measured before are kept and "
                f"marked. {again}"
            )
        if measured and earlier.trial_steps not in (0, self._config.trial_steps):
            self._screen.say(
                f"sweep.trial_steps was {earlier.trial_steps} and is {self._config.trial_steps}: rows measured before "
                f"are kept. {again}"
            )
        bad = Counter(row.status for point, row in latest.items() if point in now and row.status in _MAY_BE_RETRIED)
        if left := {status: number for status, number in bad.items() if status not in self._retry}:
            told = ", ".join(f"{number} {status}" for status, number in left.items())
            self._screen.say(f"Kept as they are: {told}; sweep.retry=[{','.join(left)}] runs them again.")

    def _adopt(self) -> None:
        """Rows of trials that ended just when the sweep was killed."""
        known = self._found.latest()
        rows = (
            recorded_row(self._row(point, "trial"), self._folder) for point in self._points if point.id not in known
        )
        self._append(*(row for row in rows if row is not None))

    def _compose(self) -> None:
        """Each point's configuration, or its row."""
        if len(self._points) > _MANY:
            self._screen.say(f"Composing {counted(len(self._points), 'point')}")
        refused: list[tuple[Point, ConfigError]] = []
        for point in self._points:
            try:
                composed = self._multirun.compose(point.overrides, self._folder / point.id)
            except ConfigError as error:
                refused.append((point, error))
            else:
                self._ready[point.id] = _Ready(point, composed)
        if not (self._ready or self._found.rows) and len({refusal.faults for _, refusal in refused}) == 1:
            raise refused[0][1]  # of what all points share: no axis can cure it
        for point, refusal in refused:
            self._refuse(point, "invalid", " ".join(map(str, refusal.faults)))

    def _plan(self, looks: Looks, stems: Stems, points: Sequence[str]) -> None:
        """Each of these points' plan, or its row."""
        from wellfed.trials import trial
        from wellfed.trials.fork_server import StemFailed

        groups: dict[str, list[str]] = {}
        for point in dict.fromkeys(points):
            groups.setdefault(trial.what_is_shared(self._ready[point].composed.config), []).append(point)
        if groups:
            different = f" of {len(groups)} different data or models" if len(groups) > 1 else ""
            self._screen.say(f"Planning {counted(sum(map(len, groups.values())), 'point')}{different}")
        for shared, members in groups.items():
            left = members
            try:
                stem = stems.get(shared, self._ready[left[0]].composed.config)
            except StemFailed as failed:
                for point in left:
                    self._refuse(self._ready.pop(point).point, failed.status, str(failed))
                continue
            try:
                while left:
                    left = self._look(looks, stem, left)
                self._share_rows(looks, stem, members)
            except StemFailed:  # killed from outside, for want of memory above all: what is left is simply tried
                stems.drop(stem)

    def _look(self, looks: Looks, stem: Stem[Any], points: Sequence[str]) -> list[str]:
        """Plans points in one process; those that are left because one has ended it, which is then simply tried."""
        told = looks.plans(stem, [(point, self._ready[point].composed) for point in points])
        if not told:
            return list(points[1:])
        machine, *plans = told
        self._gpus = visible(os.environ, machine["num_gpus"])
        self._note_machine(machine["machine"])
        for plan in plans:
            ready = self._ready[plan["point"]]
            if plan["problem"] is not None:
                del self._ready[plan["point"]]
                self._refuse(ready.point, "infeasible", plan["problem"], plan.get("predicted_peak_gib"))
            else:
                known = {name: plan[name] for name in ("num_gpus", "predicted_peak_gib", "seen", "keeps_rows")}
                self._ready[plan["point"]] = replace(ready, **known)
        return list(points[len(plans) + 1 :])

    def _share_rows(self, looks: Looks, stem: Stem[Any], points: Sequence[str]) -> None:
        """Feature rows, once for all trials that keep them; where they can't be had, each computes its own."""
        keep = [point for point in points if point in self._ready and self._ready[point].keeps_rows]
        rows = looks.rows(stem) if keep else None
        for point in keep:
            self._ready[point] = replace(self._ready[point], rows=rows)

    def _note_machine(self, machine: str) -> None:
        if self._file.machine not in ("", machine):
            self._screen.say(
                f"This is another machine than before ({self._file.machine} -> {machine}): rates of two machines are "
                "no comparison. Take another sweep.name to keep them apart."
            )
        self._file = replace(self._file, machine=machine)

    def _missing(self) -> list[str]:
        missing = ledger.missing(self._file.ids, self._found, self._retry)
        return [point for point in missing if point in self._ready]

    @property
    def _retry(self) -> list[str]:
        return [status.value for status in self._config.retry]

    # -- trials ---------------------------------------------------------------------------------------------------

    def _run_missing(self, stems: Stems) -> bool:
        """False: stopped at the first that did not end well."""
        refused = len(self._points) - len(self._ready)
        if self._config.fail_fast and refused:
            self._screen.say(f"sweep.fail_fast=true, and {counted(refused, 'point')} can't be run: none is started.")
            return False
        missing = self._missing()
        self._screen.begin(len(missing), self._best())
        if self._launch is not None:
            return self._launch_elsewhere(missing)
        return self._run(stems, [self._trial(point, "trial") for point in missing])

    def _launch_elsewhere(self, missing: Sequence[str]) -> bool:
        """By Hydra's own means: the same trials, told when all have ended."""
        assert self._launch is not None
        jobs = []
        for point in missing:
            self._make_room(self._folder / point)
            where = [assigned("hydra.sweep.dir", str(self._folder.absolute())), f"hydra.sweep.subdir={point}"]
            jobs.append([*self._ready[point].point.overrides, *where])
        if jobs:
            self._launch(jobs)
        for point in missing:
            row = self._row(self._ready[point].point, "trial")
            self._note(recorded_row(row, self._folder) or refused_row(row, "failed", "left no complete record"))
        return True

    def _confirm(self, stems: Stems) -> None:
        """The best, measured again in turn; rounds in which all of them have been count, whenever they were."""
        trials = self._to_confirm()
        if not trials:
            return
        self._screen.begin(len(trials), self._best(), "Measuring the best again, in turn")
        for point in trials:  # one at a time: nothing disturbs a measurement
            if not self._run(stems, [self._trial(point, "confirm")]):
                return

    def _to_confirm(self) -> list[str]:
        """The best in turn, a round after the other; none where there is nothing to compare."""
        best = self._best_ready()
        if len(best) < 2 or self._launch is not None:
            return []
        done = min(len(self._found.confirms(point)) for point in best)
        # Every other round backwards: nobody always follows the same one.
        return [point for number in range(done, CONFIRM_ROUNDS) for point in (best if number % 2 == 0 else best[::-1])]

    def _run(self, stems: Stems, trials: Sequence[Trial]) -> bool:
        """False: stopped at the first that did not end well."""
        from wellfed.trials.trial_pool import Trials

        goes_on = True

        def note(row: Row) -> bool:
            nonlocal goes_on
            self._note(row)
            goes_on = goes_on and (row.status == "ok" or not self._config.fail_fast)
            return goes_on

        def on_end(trial: Trial, ended: Ended, timed_out: bool) -> bool:
            begun = self._begun.pop(trial.key)
            return note(
                ended_row(begun, self._folder, exit_code=ended.code, seconds=ended.seconds, timed_out=timed_out)
            )

        def on_failed(trial: Trial, failed: StemFailed) -> bool:
            return note(refused_row(self._begun.pop(trial.key), failed.status, str(failed)))

        Trials(
            stems=stems,
            slots=Slots(self._gpus, wellfed.cpus.AT_START),
            timeout_s=self._config.timeout_s,
            on_start=lambda trial: self._make_room(trial.folder),
            on_end=on_end,
            on_failed=on_failed,
            on_tick=self._screen.tick,
        ).run(trials)
        return goes_on

    def _trial(self, point: str, kind: Literal["trial", "confirm"]) -> Trial:
        from wellfed.trials.trial import Task, what_is_shared
        from wellfed.trials.trial_pool import Trial

        ready = self._ready[point]
        row = replace(self._row(ready.point, kind), predicted_peak_gib=ready.predicted_peak_gib)
        self._begun[row.folder] = row
        folder = self._folder / row.folder
        composed = replace(ready.composed, run_dir=folder)
        return Trial(
            key=row.folder,
            shared=what_is_shared(composed.config),
            config=composed.config,
            task=Task(composed, ready.seen, ready.rows),
            folder=folder,
            num_gpus=ready.num_gpus or 0,
        )

    def _make_room(self, folder: Path) -> None:
        """An earlier attempt's folder is kept beside."""
        if folder.exists():
            number = 1
            while (aside := folder.with_name(f"{folder.name}.attempt{number}")).exists():
                number += 1
            folder.rename(aside)
        folder.mkdir()

    # -- rows -----------------------------------------------------------------------------------------------------

    def _row(self, point: Point, kind: Literal["trial", "confirm"]) -> Row:
        """What is known of a trial before it starts."""
        attempt = len(self._found.of(point.id, kind)) + 1
        return Row(
            point=point.id,
            kind=kind,
            overrides=tuple(masked_override(text) for text in point.overrides),
            status="failed",
            attempt=attempt,
            folder=point.id if kind == "trial" else f"{point.id}.confirm{attempt}",
            code=self._code,
        )

    def _refuse(self, point: Point, status: Status, problem: str, predicted_peak_gib: float | None = None) -> None:
        """A row for what is not run; once, however often the command is given, and never in place of a measured one."""
        row = refused_row(self._row(point, "trial"), status, problem)
        row = replace(row, folder="", predicted_peak_gib=predicted_peak_gib)
        self._screen.refused(row)
        last = self._found.latest().get(point.id)
        is_measured = last is not None and last.status == "ok" and "ok" not in self._retry
        if not is_measured and (last is None or (last.status, last.error) != (row.status, row.error)):
            self._append(row)

    def _note(self, row: Row) -> None:
        self._append(row)
        self._screen.ended(row, self._best())

    def _append(self, *rows: Row) -> None:
        self._found = replace(self._found, rows=(*self._found.rows, *rows))  # known, if it can't be written
        ledger.append(self._folder, rows)

    def _best_ready(self) -> list[str]:
        """Those that are measured again, fastest first."""
        return [row.point for row in self._by_rate() if row.point in self._ready][:CONFIRMED]

    def _by_rate(self) -> list[Row]:
        rows = self._found.latest()
        ok = [rows[point] for point in self._file.ids if point in rows and rows[point].status == "ok"]
        return sorted((row for row in ok if row.samples_per_s), key=lambda row: -(row.samples_per_s or 0))

    def _best(self) -> Row | None:
        return next(iter(self._by_rate()), None)

    def _finish(self) -> int:
        """Ranks what is there; the exit code."""
        self._screen.end()
        board = leaderboard(self._file, self._found)
        try:
            self._file.write(self._folder)  # it may have ended before there was one
            written = leaderboard_files.write(self._folder, board)
        except OSError as error:
            self._screen.say(f"The leaderboard can't be written: {error}. The rows are in {ledger.FILE_NAME}.")
        else:
            self._screen.finished(board, written)
        return EXIT_OK if self._best() is not None else EXIT_FAILED

    def _publish(self) -> None:
        """To wandb; its troubles are no trouble of the sweep."""
        from wellfed.trials.publish import is_published, publish

        logger = self._base.config.logger
        number = len(self._found.rows)
        is_off = decide_mode(logger.mode.value) == "disabled"
        if is_off or self._best() is None or is_published(self._folder, number):
            return
        self._screen.say("Putting the trials into wandb")
        rows = [row for row in self._found.latest().values() if row.point in self._file.ids]
        try:
            publish(self._folder, self._file, rows, logger, number_of_rows=number)
        except (RuntimeError, OSError) as error:
            self._screen.say(f"{error}; the files have every figure.")

    def _log(self, number: int) -> Path:
        """Of what the process prints that prepares data and model."""
        return self._folder / f"shared_{number}.log"


def prepare_to_fork(config: RunConfig) -> None:
    """Before torch is imported: what it reads then, and that to ask whether there is a GPU must not start CUDA."""
    set_environment(os.environ, config)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available's documentation


def _masked_values(axis: str, values: Sequence[str]) -> tuple[str, ...]:
    """Secrets as ``***`` and their number."""
    texts = [(f"{axis}={value}", value) for value in values]
    return tuple(
        value if masked_override(text) == text else f"{SECRET_SHOWN}{number}"
        for number, (text, value) in enumerate(texts, start=1)
    )
