"""Runs ``python src/train.py -m sweep=<option>``: every combination a row of the ledger, then the leaderboard.

All points are composed and planned before the first is run. Each trial is a process of its own; whatever becomes of it
is a row, and the same command again runs what is missing. The order of things is here; `trial_setup`,
`sweep_execution` and `sweep_ledger` do them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from wellfed.command_line import words
from wellfed.config.compose import Composed
from wellfed.config.entry import where_flags
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig, SweepConfig
from wellfed.errors import EXIT_FAILED, ConfigError, Fault
from wellfed.masking import SECRET_SHOWN, masked_override
from wellfed.process import MAY_FORK, Stopped, StopRequest, exit_code_of
from wellfed.record import engine_state
from wellfed.run.folder.lock import made, only_one
from wellfed.run.ranks.announce import announce
from wellfed.run.train import own_git_state, set_environment
from wellfed.study.sweep import ledger
from wellfed.study.sweep.grid import Grid, SweepFile
from wellfed.study.sweep.rows import code_version
from wellfed.study.trials.elsewhere import SweepElsewhere, cluster_of
from wellfed.study.trials.energy import check_energy
from wellfed.study.trials.sweep_ledger import SweepLedger
from wellfed.study.trials.sweep_screen import SweepScreen
from wellfed.study.trials.trial_pool import ForkServers
from wellfed.study.trials.trial_setup import TrialSetup, scratch_folder
from wellfed.units import counted, show_duration

if TYPE_CHECKING:
    from wellfed.study.clusters.cluster import Cluster
    from wellfed.study.trials.sweep_execution import Launch

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
    cluster = None if launcher is None else cluster_of(launcher, folder)
    is_new = not folder.exists()
    stop = StopRequest()
    with only_one(made(folder)), stop.listening():
        file = _sweep_file(base, grid)
        screen = SweepScreen(folder, file)
        kept = SweepLedger(folder, file, base.config.sweep, screen)
        is_ranked = False
        try:
            setup = _set_up(multirun, grid, kept, screen, base.config.sweep.timeout_s)
            if cluster is None:
                _measure(base.config, grid, kept, screen, setup, launch)
            else:
                _measure_elsewhere(base.config.sweep, grid, kept, screen, setup, cluster, stop)
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
    varied, fixed = multirun.varied()
    axes = {name: each.values for name, each in varied.items()}
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


def _set_up(multirun: Multirun, grid: Grid, kept: SweepLedger, screen: SweepScreen, timeout_s: float) -> TrialSetup:
    """All points composed, and what earlier commands have left taken over."""
    kept.say_what_changed()
    kept.adopt(grid.points())
    setup = TrialSetup(multirun.compose, kept, screen, kept.folder / ".scratch", timeout_s)
    setup.compose(grid.points())
    return setup


def _measure(
    config: RunConfig,
    grid: Grid,
    kept: SweepLedger,
    screen: SweepScreen,
    setup: TrialSetup,
    launch: Launch | None,
) -> None:
    """All stages, until each point that can be run has its rows."""
    if not (kept.missing(setup.ready) or (launch is None and kept.to_confirm(setup.ready))):
        return
    options = config.sweep
    prepare_to_fork(config)
    announce(f"Sweep of {counted(grid.size, 'point')}: importing PyTorch, reading data, building the model")
    from wellfed.study.trials import trial
    from wellfed.study.trials.sweep_execution import SweepExecution

    def log(number: int) -> Path:
        return kept.folder / f"shared_{number}.log"

    with (
        scratch_folder(setup.scratch),
        closing(ForkServers(trial.prepare, trial.work, log, options.timeout_s)) as servers,
    ):
        if MAY_FORK:
            best = [] if launch is not None else kept.best_among(setup.ready)
            setup.plan(servers, dict.fromkeys([*kept.missing(setup.ready), *best]))
        kept.file.write(kept.folder)
        if options.fail_fast and setup.says_refused(grid.size):
            return
        execution = SweepExecution(setup, kept, screen, servers, options)
        if launch is not None:
            execution.launch_missing(launch)
        elif execution.run_missing():
            execution.confirm()


def _measure_elsewhere(
    config: SweepConfig,
    grid: Grid,
    kept: SweepLedger,
    screen: SweepScreen,
    setup: TrialSetup,
    cluster: Cluster,
    stop: StopRequest,
) -> None:
    """The same on other machines, which plan each point themselves."""
    if not (kept.missing(setup.ready) or kept.to_confirm(setup.ready)):
        return
    execution = SweepElsewhere(setup.ready, kept, screen, cluster, config, stop)
    alive = setup.scratch / f"alive_{os.getpid()}_{time.time_ns()}"
    with scratch_folder(setup.scratch), execution.reached(alive):
        kept.file.write(kept.folder)
        if config.fail_fast and setup.says_refused(grid.size):
            return
        if execution.run_missing():
            execution.confirm()


def prepare_to_fork(config: RunConfig) -> None:
    """Before torch is imported: what it reads then, and that to ask whether there is a GPU must not start CUDA."""
    set_environment(os.environ, config)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available's documentation
