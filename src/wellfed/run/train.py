"""Starts one run: folder, lock and first record, then its stages; removes the folder where nothing was run."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import Allocator, RunConfig
from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OK, ConfigError, WellfedError
from wellfed.masking import MaskedFormatter, learn, masked_override
from wellfed.plan.nodes import launch_faults
from wellfed.process import Stopped, StopRequest, exit_code_of
from wellfed.ranks import launched, own_rank
from wellfed.record import GitState, RunRecord, engine_state, git_state
from wellfed.run import screen
from wellfed.run.folder import resume, run_folder
from wellfed.run.folder.lock import only_one
from wellfed.units import show_text

if TYPE_CHECKING:
    from wellfed.run.objects.run_objects import RunObjects
    from wellfed.run.ranks.following import Word
    from wellfed.run.ranks.line import Line
    from wellfed.train.lightning.callbacks.pruning import Judge

_LOG = logging.getLogger("wellfed")
TRIAL = "WELLFED_TRIAL"
"""Environment variable of a trial's process, and so of its other ranks: the run is only timed."""
SPIN_COUNT = "10000"
"""Turns that torch's CPU threads (GNU OpenMP) wait for work before they sleep. Its own 300,000 stall a run when another
process wants the cores: record 2026-11-21_omp_spin_cpu."""
_KEPT_BY_RESUME = (
    *("started_at", "duration_s", "wandb", "mlflow", "events", "steps", "epochs", "samples", "metrics", "artifacts"),
    *("throughput", "ceiling", "readiness_frac", "time", "loading", "synchronisations", "profile", "memory"),
    *("host", "tested"),
)
"""What a run that goes on in its folder knows of itself already, until it has something newer."""


def train(
    composed: Composed[RunConfig],
    parts: RunObjects | None = None,
    line: Line | None = None,
    word: Word | None = None,
    judge: Judge | None = None,
) -> int:
    """Run it; the exit code. Whatever happens, the run's folder tells, or there is none, since nothing was run.

    Args:
        composed: with an option of ``sweep``, or in the process of a trial (`TRIAL`), the run is only timed.
        parts: data and model, where they are made already.
        line: to the other ranks, where torchrun or srun has started them.
        word: of rank 0, on another rank of these.
        judge: may end the training early; is told each validation's number, from 1, and its best metric.
    """
    try:
        with StopRequest().listening() as stop:
            return _train(composed, stop, parts, line, word, judge)
    except WellfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(show_text(str(error)), file=sys.stderr)
        return EXIT_NOTHING_RUN


def _train(
    composed: Composed[RunConfig],
    stop: StopRequest,
    parts: RunObjects | None,
    line: Line | None,
    word: Word | None,
    judge: Judge | None,
) -> int:
    """If nothing was run, the folder is as it was."""
    began_s, config, rank = time.monotonic(), composed.config, own_rank()
    learn(composed.secrets)  # another process may have composed it
    if faults := list(launch_faults(config.trainer, launched())):
        raise ConfigError(faults)
    is_trial = "sweep" in composed.choices or TRIAL in os.environ  # it has a record whatever becomes of it
    target = word.target if word else _target(config, rank)
    if target and target.earlier:
        resume.check_unchanged(composed, target.earlier)
    folder = _open_folder(composed, target, rank, word)
    set_environment(os.environ, config)
    with only_one(folder.path):
        if target is not None and target.in_place and word is None:  # another resume may have ended since
            target = _target(config, rank)
        folder = folder.keep()
        run, run_record = None, begin_record(composed, folder, target)
        try:
            if rank == 0:
                _write_first(composed, folder.path, run_record)
            with log_file(folder.path / "train.log"):
                if folder.warning:
                    _LOG.warning(folder.warning)
                if rank == 0 and not is_trial:
                    screen.show_start(
                        screen.Terminal(),
                        config.workload.name,
                        None if target is None else target.checkpoint.parent.parent,
                    )
                from wellfed.run.passes.passes import Measure
                from wellfed.run.ranks.following import lead
                from wellfed.run.ranks.other_ranks import OtherRanks  # torch and Lightning from here on
                from wellfed.run.stages import Run

                if line is not None and rank == 0:
                    lead(line, composed, target, folder.path, run_record.git)
                measure = Measure(config.sweep.trial_steps) if is_trial else None
                others = OtherRanks(rank, folder.path, line)
                run = Run(composed, folder.path, run_record, target, rank, stop, began_s, parts, measure, others, judge)
                exit_code = run.go()
        except Stopped as stopped:  # while torch was imported
            run_record.status = "interrupted"
            run_record.exit_code = exit_code = exit_code_of(stopped.signum)
            run_record.write(folder.path)
        except BaseException:
            if rank > 0:
                folder.keep_log(f"train.rank{rank}.log")
            if run is None or not run.has_trained or rank > 0:
                folder.undo()
            folder.done()
            raise
        if rank > 0 and EXIT_OK < exit_code < exit_code_of(0):  # no signal has ended it
            folder.keep_log(f"train.rank{rank}.log")
        if (run is not None and run.is_refused and not is_trial) or rank > 0:
            folder.undo()
        folder.done()
        run_folder.release(folder.path)
        return exit_code


def spin_less(environ: MutableMapping[str, str]) -> None:
    """Before torch is imported."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def set_environment(environ: MutableMapping[str, str], config: RunConfig) -> None:
    """What torch reads once, when it is imported or CUDA starts; what the user has set stays."""
    spin_less(environ)
    if config.gpu.allocator is Allocator.expandable:
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _open_folder(
    composed: Composed[RunConfig], target: resume.Target | None, rank: int, word: Word | None
) -> run_folder.RunFolder:
    config = composed.config
    if rank > 0:  # rank 0 writes down what all of them do
        return run_folder.of_rank(rank, None if word is None else word.folder)
    if composed.run_dir is not None:
        return run_folder.open_given(composed.run_dir, resume=target is not None and target.in_place)
    return run_folder.create(Path(config.paths.log_dir), config.workload.name)


def _target(config: RunConfig, rank: int) -> resume.Target | None:
    return resume.locate(Path(config.resume), may_run=rank > 0) if config.resume else None


def _write_first(composed: Composed[RunConfig], folder: Path, run_record: RunRecord) -> None:
    """From here on the run has a record, if so much fits on the disk."""
    try:
        composed.write_hydra_files(folder)
        run_record.write(folder)
        run_folder.reserve(folder)
    except OSError as error:
        problem = f"nothing can be written to {folder}: {error.strerror}."
        raise ConfigError.of("paths.log_dir", problem, "Free space, or name a folder on another disk.") from error


def begin_record(
    composed: Composed[RunConfig], folder: run_folder.RunFolder, target: resume.Target | None
) -> RunRecord:
    """The record of a run that starts now, or goes on in its own folder."""
    launch = launched()
    started = replace(
        RunRecord.start(folder.path.name),
        seed=composed.config.seed,
        workload=composed.config.workload.name,
        overrides=[masked_override(text) for text in composed.overrides if not text.startswith(("resume=", "rerun="))],
        config=composed.resolved,
        git=_git_state(composed.config) if own_rank() == 0 else None,  # the record of another rank goes nowhere
        engine=engine_state(),
        launch=None if launch is None else {"by": launch.by, "job": launch.job, "attempt": launch.attempt},
        resumed_from=None if target is None else str(target.checkpoint),
    )
    if target is None or not target.in_place or target.earlier is None:
        return started
    return replace(started, **{name: getattr(target.earlier, name) for name in _KEPT_BY_RESUME})


def _git_state(config: RunConfig) -> GitState | None:
    git = own_git_state()
    return git if git is None or config.logger.diff else {**git, "diff": ""}


@cache
def own_git_state() -> GitState | None:
    """Returns the state of the project's checkout; git is asked once, which takes 50 ms."""
    return git_state(project.root())


class _LogFile(logging.FileHandler):
    """Keeps quiet about a full disk, which the run's tables report: logging would print a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Stderr(logging.StreamHandler[TextIO]):
    """Whatever is Python's stderr by then: a bar that is drawn puts itself there, to go on below what is said."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Everything logged, and Python's warnings, go to the file; warnings of ours to the terminal too."""
    root, package = logging.getLogger(), logging.getLogger("wellfed")
    terminal = _Stderr()
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(MaskedFormatter("%(levelname)s: %(message)s"))
    handlers: list[tuple[logging.Logger, logging.Handler]] = [(package, terminal)]
    try:
        file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(MaskedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append((root, file))
    except OSError as error:
        print(f"{path} can't be written ({error.strerror}); the log goes to the terminal alone.", file=sys.stderr)
    for logger, handler in handlers:
        logger.addHandler(handler)
    level, root.level = root.level, logging.INFO
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for logger, handler in handlers:
            logger.removeHandler(handler)
            with suppress(OSError):  # a full disk
                handler.close()
