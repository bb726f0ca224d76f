"""Starts one run, on all of its ranks: folder, lock and first record, then its stages.

The command calls `on_all_ranks`, and each rank then calls `train`. The folder is removed if nothing was run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from wellfed import project
from wellfed.command_line import typed_arguments
from wellfed.config.compose import Composed
from wellfed.config.schema import Allocator, RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_NOTHING_RUN, EXIT_OK, ConfigError, WellfedError
from wellfed.masking import learn, masked_override
from wellfed.plan.nodes import launch_faults
from wellfed.process import Stopped, StopRequest, exit_code_of, without_collections
from wellfed.ranks import launched, own_rank
from wellfed.record.entries import FILE_NAME, GitState, LaunchEntry, RunRecord
from wellfed.record.provenance import engine_state, git_state
from wellfed.run.folder import resume, run_folder
from wellfed.run.folder.lock import only_one
from wellfed.run.folder.log import log_file
from wellfed.run.outcome import Outcome, RankEnded
from wellfed.run.ranks.coordination import SharedRun, invited
from wellfed.run.ranks.exchange import Exchange
from wellfed.run.restart import Restarts
from wellfed.units import show_text

if TYPE_CHECKING:
    from wellfed.run.objects.run_objects import RunObjects
    from wellfed.run.passes.base import Pruner
    from wellfed.run.screen import Terminal

TRIAL = "WELLFED_TRIAL"
"""Environment variable of a trial's process and its other ranks: the run is only timed."""
SPIN_COUNT = "10000"
"""Spins of torch's CPU threads (GNU OpenMP) before they sleep. The default of 300,000 stalls a run when another process
needs the cores: record 2026-11-21_omp_spin_cpu."""
_LAUNCH = ("by", "job", "attempt")
_KEPT_BY_RESUME = (
    *("started_at", "duration_s", "wandb", "mlflow", "events", "steps", "epochs", "samples", "metrics", "artifacts"),
    *("throughput", "ceiling", "readiness_frac", "time", "loading", "synchronisations", "profile", "memory"),
    *("host", "tested", "phases", "wall"),
)
"""Fields of the record that a resumed run keeps until it has measured newer ones, or adds to."""


def on_all_ranks(main: Callable[[Callable[[Composed[RunConfig]], int]], int]) -> int:
    """Runs a command on each rank that torchrun, srun or Lightning has started; returns this rank's exit code.

    Args:
        main: composes the command line and calls its argument with the result. Called on rank 0 only, or in a single
            process. Other ranks train what rank 0 has composed.
    """
    exchange = invited()
    if exchange is None:
        launch = launched()
        if launch is None or launch.world_size == 1:
            return main(train)
        if {"-m", "--multirun"} & set(typed_arguments()):
            problem = f"is for many runs, and {launch.by} has started the ranks of one."
            if launch.rank == 0:
                print(ConfigError.of("-m", problem, f"Start it without {launch.by}."), file=sys.stderr)
            return EXIT_NOTHING_RUN
        exchange = Exchange(launch)
    code = EXIT_FAILED
    try:
        code = main(partial(train, exchange=exchange)) if exchange.launch.rank == 0 else _follow(exchange)
    finally:
        exchange.close(Outcome("ok" if code == EXIT_OK else "invalid", code))
    if code not in (EXIT_OK, EXIT_NOTHING_RUN):  # threads of a collective that has lost a rank may never end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _follow(exchange: Exchange) -> int:
    """Trains what rank 0 has composed; returns the exit code."""
    spin_less(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch would print C++ frames when rank 0 is gone
    try:
        shared: SharedRun = exchange.broadcast("run")
    except RankEnded as ended:
        exchange.report(ended.outcome)  # rank 0 shows it
        return ended.outcome.exit_code
    except WellfedError as error:
        print(show_text(str(error)), file=sys.stderr)
        return EXIT_NOTHING_RUN
    return train(shared.composed, exchange=exchange, shared=shared)


def train(
    composed: Composed[RunConfig],
    parts: RunObjects | None = None,
    pruner: Pruner | None = None,
    exchange: Exchange | None = None,
    shared: SharedRun | None = None,
) -> int:
    """Trains and returns the exit code. The outcome is in the run folder, which is removed if nothing was run.

    Args:
        composed: with an option of ``sweep``, or in the process of a trial (`TRIAL`), the run is only timed.
        parts: data and model, if they already exist.
        pruner: may end the training early. Gets each validation's number, from 1, and its best metric.
        exchange: connection to the other ranks, if they already run.
        shared: on other ranks, the run that rank 0 has composed.
    """
    try:
        with StopRequest().listening() as stop:
            return Start(composed, stop, parts, pruner, exchange, shared).run()
    except WellfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(show_text(str(error)), file=sys.stderr)
        return EXIT_NOTHING_RUN


@dataclass
class Start:
    """Start of one run: arguments as for `train`, then what is opened before torch is imported."""

    composed: Composed[RunConfig]
    stop: StopRequest
    parts: RunObjects | None
    pruner: Pruner | None
    exchange: Exchange | None
    shared: SharedRun | None
    rank: int = field(default_factory=own_rank)
    restarts: Restarts = field(default_factory=Restarts)
    began_s: float = field(default_factory=time.monotonic)
    """Start of the command, by the monotonic clock."""
    folder: run_folder.RunFolder = field(init=False)
    target: resume.Target | None = field(init=False)
    """Checkpoint from which the run resumes."""
    record: RunRecord = field(init=False)
    console: Terminal = field(init=False)

    @property
    def is_trial(self) -> bool:
        """The run is only timed: no validation, no checkpoint, no test, no loggers. Its record is always kept."""
        return "sweep" in self.composed.choices or TRIAL in os.environ

    def run(self) -> int:
        """Makes all checks that need no torch, opens the folder, and runs the stages."""
        learn(self.composed.secrets)  # another process may have composed it
        if faults := list(launch_faults(self.composed.config.trainer, launched())):
            raise ConfigError(faults)
        set_environment(os.environ, self.composed.config)
        if self.composed.changes_folder and self.composed.run_dir is not None:
            self.composed = replace(self.composed, run_dir=self.composed.run_dir.absolute())
        with self._folder() as self.folder:
            self.target = self._target()  # within the lock, since another resume would move it on
            where = self.folder.path if self.shared is None else self.shared.folder
            self.composed = self.composed.in_folder(where)
            self.record = begin_record(self.composed, self.folder, self.target)
            if self.rank == 0 and not self.folder.is_resumed:
                run_folder.write_first(self.composed, where, self.record)
            with log_file(self.folder.path / "train.log"), self.composed.as_job():
                return self._stages()

    def _stages(self) -> int:
        from wellfed.run import screen  # imports rich, but this module is imported first

        self.console = screen.Terminal(quiet=self.rank > 0)
        if self.rank == 0 and not self.is_trial:
            origin = None if self.target is None else self.target.folder
            screen.show_start(self.console, self.composed.config.workload.name, origin)
        try:
            with without_collections():
                from wellfed.run.stages import Run  # imports torch and Lightning
        except Stopped as stopped:  # the folder goes, since nothing was run
            return exit_code_of(stopped.signum)
        return Run(self).go()

    @contextmanager
    def _folder(self) -> Iterator[run_folder.RunFolder]:
        """Locks this rank's folder for the block, then removes what it wrote unless the block marks it as kept."""
        run_dir, config = self.composed.run_dir, self.composed.config
        if self.rank > 0:  # rank 0 records for all ranks
            folder = run_folder.of_rank()
        elif run_dir is None:
            folder = run_folder.create(Path(config.paths.log_dir), config.workload.name)
        else:
            is_resumed = config.resume is not None and Path(config.resume).is_dir()
            folder = run_folder.open_given(run_dir, resume=is_resumed)
        with only_one(folder.path, make=folder.is_new and self.rank == 0):
            if self.restarts.reason is not None and not folder.is_resumed:  # emptied but for the record
                (folder.path / FILE_NAME).unlink(missing_ok=True)
                folder = replace(folder, is_new=True)
            folder = folder.begun()
            try:
                yield folder
            finally:
                if self.shared is not None and (launch := launched()) is not None and launch.node > 0:
                    run_folder.keep_readings_of_node(folder.path, self.shared.folder, launch.node)
                if self.rank > 0 or not folder.stays:
                    folder.undo()
                run_folder.release(folder.path)

    def _target(self) -> resume.Target | None:
        """Returns the checkpoint to resume from. The run must learn the same as the one that wrote it."""
        named = self.composed.config.resume
        if self.shared is not None or not named:
            return None if self.shared is None else self.shared.target
        target = resume.locate(Path(named))
        if target.earlier is not None:
            for line in resume.check_unchanged(self.composed.in_folder(target.folder), target.earlier):
                print(f"resume: {line}", file=sys.stderr)
        return target


def spin_less(environ: MutableMapping[str, str]) -> None:
    """Lets torch's CPU threads wait less actively. Call it before torch is imported."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def set_environment(environ: MutableMapping[str, str], config: RunConfig) -> None:
    """Sets what torch reads once, when it is imported or CUDA starts. The user's own values are kept."""
    spin_less(environ)
    if config.trainer.world_size > 1:
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # C++ frames when a rank is gone, and DDP's advice
    if config.gpu.allocator is Allocator.expandable:
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def begin_record(
    composed: Composed[RunConfig], folder: run_folder.RunFolder, target: resume.Target | None
) -> RunRecord:
    """Returns the record of a run that starts now, or resumes in its own folder."""
    launch = launched()
    started = replace(
        RunRecord.start(folder.path.name),
        seed=composed.config.seed,
        workload=composed.config.workload.name,
        overrides=[masked_override(text) for text in composed.overrides if not text.startswith(("resume=", "rerun="))],
        config=composed.resolved,
        flags=[masked_override(text) for text in composed.flags],
        git=own_git_state() if own_rank() == 0 else None,  # another rank's record is not written
        engine=engine_state(),
        launch=None if launch is None else cast("LaunchEntry", {name: getattr(launch, name) for name in _LAUNCH}),
        resumed_from=None if target is None else str(target.checkpoint),
    )
    if target is None or not target.in_place or target.earlier is None:
        return started
    earlier = target.earlier
    # A trial that ended well stays one; any other is run again by its study.
    trial = earlier.trial if earlier.status == "ok" or earlier.resumed_from is not None else None
    return replace(started, trial=trial, **{name: getattr(earlier, name) for name in _KEPT_BY_RESUME})


@cache
def own_git_state() -> GitState | None:
    """Returns the state of the project's checkout, cached, since git takes 50 ms."""
    return git_state(project.root())
