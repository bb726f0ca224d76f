"""Runs ``python src/train.py -m sweep=<option>``: every combination a row of the ledger, then the leaderboard.

All points are composed and planned before the first is run. Each trial is a process of its own; whatever becomes of it
is a row, and the same command again runs what is missing. The order of things is here; `trial_setup`,
`sweep_execution` and `sweep_ledger` do them.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from wellfed.command_line import words
from wellfed.config.compose import Composed
from wellfed.config.entry import where_flags
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, ConfigError, Fault
from wellfed.masking import SECRET_SHOWN, masked_override
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of
from wellfed.record import engine_state
from wellfed.run.folder.lock import made, only_one
from wellfed.run.ranks.announce import announce
from wellfed.run.train import own_git_state
from wellfed.study.executors.executor import Launch, StudySettings, row_of_end
from wellfed.study.executors.launchers import executor_of, is_remote
from wellfed.study.executors.local import prepare_to_fork
from wellfed.study.sweep import ledger
from wellfed.study.sweep.grid import Grid, SweepFile
from wellfed.study.sweep.rows import code_version
from wellfed.study.trials.energy import check_energy
from wellfed.study.trials.sweep_execution import SweepExecution
from wellfed.study.trials.sweep_ledger import SweepLedger
from wellfed.study.trials.sweep_screen import SweepScreen
from wellfed.study.trials.trial_setup import TrialSetup, scratch_folder
from wellfed.units import counted, show_duration

_GUESSED_TRIAL_S = 5
_NAME = re.compile(r"\w[\w.-]*")


def run_sweep(multirun: Multirun, launcher: Mapping[str, Any] | None = None, launch: Launch | None = None) -> int:
    """All of it; 0 if any trial is ok.

    Args:
        launcher: the configuration of another launcher than ours; trials are in processes of our own, one a GPU at a
            time, or on the machines that it names.
        launch: what that launcher does, where we know no machines by its configuration.

    Raises:
        ConfigError: no sweep can be made of this; nothing was run.
    """
    base = multirun.base()
    grid, folder = _checked(multirun, base, is_here=launcher is None)
    is_new = not folder.exists()
    stop = StopRequest()
    with only_one(made(folder)), stop.listening():
        file = _sweep_file(base, grid)
        screen = SweepScreen(folder, file)
        kept = SweepLedger(folder, file, base.config.sweep, screen)
        is_ranked = False
        try:
            setup = _set_up(multirun, grid, kept, screen)
            _measure(base, grid, kept, screen, setup, launcher, launch, stop)
            exit_code = kept.rank()
            is_ranked = True
            kept.publish(base.config.logger)
            return exit_code
        except (Stopped, KeyboardInterrupt):
            stop.is_finishing = True  # an impatient second signal must not become a traceback
            if is_ranked:
                screen.say("Stopped while putting the trials into wandb. The same command again does the rest.")
            else:
                kept.rank()
                screen.say("Stopped. The same command again runs what is missing.")
            return exit_code_of(stop.signum or signal.SIGINT)
        except ConfigError:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as error:  # a disk that is full, above all
            exit_code = EXIT_FAILED if is_ranked else kept.rank()
            where = f" ({error.filename})" if error.filename else ""
            screen.say(f"Stopped: {error.strerror or error}{where}. Make room, then the same command goes on.")
            return exit_code


def _checked(multirun: Multirun, base: Composed[RunConfig], *, is_here: bool) -> tuple[Grid, Path]:
    """What is to be run, and the folder for it."""
    config, chosen = base.config, f"sweep={base.choices['sweep']}"
    axes, fixed = multirun.axes()
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


def named_folder(multirun: Multirun, config: RunConfig, noun: Literal["sweep", "search"], name: str) -> Path:
    """Of the sweep or the search of this name, unless another one was typed.

    Raises:
        ConfigError: it can't be the name of a folder.
    """
    if not _NAME.fullmatch(name):
        problem = "becomes the name of a folder: letters, digits, '_', '-' and '.'."
        raise ConfigError.of(f"{noun}.name={name}", problem, f"Write {noun}.name=my_{noun}.")
    plural = {"sweep": "sweeps", "search": "searches"}[noun]
    return multirun.typed_dir or Path(config.paths.log_dir) / config.workload.name / plural / name


def check_one_machine(config: RunConfig) -> None:
    """Raises ConfigError: a trial would be on several machines."""
    if config.trainer.num_nodes > 1:
        where = f"trainer.num_nodes={config.trainer.num_nodes}"
        raise ConfigError.of(where, "a trial is on one machine.", "Set trainer.num_nodes=1.")


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
        machine="",
        trial_steps=config.sweep.trial_steps,
        flags=tuple(where_flags(words())),
        objective=config.sweep.objective.value,
    )


def masked_values(axis: str, values: Sequence[str]) -> tuple[str, ...]:
    """Secrets as ``***`` and their number."""
    return tuple(
        value if masked_override(f"{axis}={value}") == f"{axis}={value}" else f"{SECRET_SHOWN}{number}"
        for number, value in enumerate(values, start=1)
    )


def _set_up(multirun: Multirun, grid: Grid, kept: SweepLedger, screen: SweepScreen) -> TrialSetup:
    """All points composed, and what earlier commands have left taken over."""
    kept.say_what_changed()
    kept.adopt(grid.points())
    setup = TrialSetup(multirun.compose, kept, screen)
    setup.compose(grid.points())
    return setup


def _measure(
    base: Composed[RunConfig],
    grid: Grid,
    kept: SweepLedger,
    screen: SweepScreen,
    setup: TrialSetup,
    launcher: Mapping[str, Any] | None,
    launch: Launch | None,
    stop: StopRequest,
) -> None:
    """Runs all stages, until each point that can be run has its rows."""
    options, may_confirm = base.config.sweep, launcher is None or is_remote(launcher)
    if not (kept.missing(setup.ready) or (may_confirm and kept.to_confirm(setup.ready))):
        return
    if launcher is None:
        prepare_to_fork(base.config)
        announce(f"Sweep of {counted(grid.size, 'point')}: importing PyTorch, reading data, building the model")
    settings = StudySettings(
        folder=kept.folder,
        scratch=kept.folder / ".scratch",
        timeout_s=options.timeout_s,
        prepare_s=options.timeout_s,
        group="sweep",
        code=kept.file.code,
        row_of=row_of_end,
        say=screen.say,
        tick=screen.tick,
        stop=stop,
        see_machine=lambda seen: kept.note_machine(seen.description, seen.processor),
    )
    with scratch_folder(settings.scratch), executor_of(launcher, launch, settings) as executor:
        kept.file.write(kept.folder)
        if options.fail_fast and setup.says_refused(grid.size):
            return
        execution = SweepExecution(setup.ready, kept, screen, executor, fail_fast=options.fail_fast)
        if execution.run_missing() and may_confirm:
            execution.confirm()
