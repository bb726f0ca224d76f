"""Runs trials on other machines, for Ray and submitit: a trial is sent as bytes and comes back as a row.

`RemoteExecutor` is the study's side. `main` runs in the process that `trial_process` starts on a machine that Ray or
Slurm has chosen, with a local executor there. It makes the trial's row, since its files lie there: another machine may
see them later.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from wellfed import project
from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.process import MAY_FORK, Stopped, StopRequest, die_with_parent
from wellfed.record import engine_state
from wellfed.run.train import own_git_state
from wellfed.study.code_version import code_version
from wellfed.study.executors.executor import Ended, Executor, StudySettings, Trial, TrialEnd
from wellfed.study.executors.local import LocalExecutor, open_trial_folder, prepare_to_fork
from wellfed.study.executors.tasks import is_for_cpu
from wellfed.study.executors.trial_process import ProcessAnswer, ProcessStart
from wellfed.study.row import Row
from wellfed.study.trial_end import started_at

_SEEN_WITHIN_S = 15
"""Time for a new file to appear on another machine. After it the folder is taken for another one."""


@dataclass(frozen=True)
class Sent:
    """A trial that was handed over."""

    trial: Trial
    order: bytes
    num_gpus: int
    sent_at_s: float
    earlier: str | None
    """When the run of an earlier attempt in the trial's folder began; None = there is none."""


class RemoteExecutor(Executor):
    """An executor whose trials run in other machines' processes, which some scheduler starts.

    Attributes:
        most_gpus: GPUs of the machine that has most; None = unknown.
    """

    most_gpus: int | None = None

    def __init__(self, settings: StudySettings) -> None:
        super().__init__(settings)
        self._process = process_start()
        self._alive = settings.scratch / f"alive_{os.getpid()}_{time.time_ns()}"
        self._running: dict[Any, Sent] = {}
        """Trials by the scheduler's own handles."""

    def _reach(self) -> None:
        self._connect()
        self._alive.touch()
        # The libraries wait in native code, where an exception of a signal handler would be lost.
        self.settings.stop.is_stepping = True

    def _leave(self) -> None:
        self.settings.stop.is_stepping = False
        self._alive.unlink(missing_ok=True)
        self._disconnect()

    def start_no_more(self) -> None:
        """Drops the trials that wait: those that the scheduler starts from now on end at once."""
        super().start_no_more()
        closed_by(self._alive).touch()

    @cached_property
    def _needs(self) -> Needs:
        return needs_of(self.settings, self._alive)

    def _start(self, trial: Trial) -> Ended:
        num_gpus = self._num_gpus(trial.composed)
        if self.most_gpus is not None and num_gpus > self.most_gpus:
            message = f"trainer.devices={num_gpus}, and no machine there has more GPUs than {self.most_gpus}."
            yield trial, self._row(trial, TrialEnd(not_started="infeasible", message=message))
            return
        order = order_of(self._needs, self.settings, trial)
        earlier = started_at(self.settings.folder / trial.row.folder)
        self._submit(Sent(trial, order, num_gpus, time.monotonic(), earlier))

    def _wait(self) -> Ended:
        for sent, answer in self._answers():
            yield sent.trial, self._answered(sent, answer)
        if self.settings.stop.signum is not None:
            raise Stopped(self.settings.stop.signum)

    @abstractmethod
    def _connect(self) -> None:
        """Reaches the scheduler, or raises ConfigError."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Ends every trial that still runs."""

    @abstractmethod
    def _submit(self, sent: Sent) -> None:
        """Hands a trial over."""

    @abstractmethod
    def _answers(self) -> Sequence[tuple[Sent, ProcessAnswer]]:
        """Waits up to `TICK_S` and returns the trials that have ended.

        Raises:
            ExecutorLost: the rest can't be run.
        """

    def _num_gpus(self, composed: Composed[RunConfig]) -> int:
        """Returns how many GPUs a trial is given; 0 where it trains on the processor, or no GPU is known of."""
        config, most = composed.config, self.most_gpus
        if is_for_cpu(composed):
            return 0
        is_named = config.trainer.accelerator is Accelerator.gpu or config.gpu.memory_gib is not None
        return config.trainer.devices if most or (most is None and is_named) else 0

    def _answered(self, sent: Sent, answer: ProcessAnswer) -> Row:
        if answer.content is not None:
            row: Row = pickle.loads(answer.content)
            return row
        began = started_at(self.settings.folder / sent.trial.row.folder)
        is_begun = began is not None and began != sent.earlier
        end = TrialEnd(
            not_started=None if is_begun else "killed",
            is_lost=True,
            message=answer.problem,
            host=answer.host,
            seconds=time.monotonic() - sent.sent_at_s,
        )
        return self._row(sent.trial, end)


# -- on the other machine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """Requirements of a machine for trials of a study. The process reads them before it unpickles the trial."""

    study: str
    """Folder of the study, absolute."""
    alive: str
    """File that exists as long as the study runs. A trial that has outlived its study ends itself."""
    project: str
    """Folder of the project, absolute."""
    source: str
    """Digest of the code."""
    code: str
    """Version of the code, for messages."""
    argv: tuple[str, ...]
    """Command line of the study. Lightning starts the other ranks of a trial by it."""


def process_start() -> ProcessStart:
    """Returns how to start `main` on another machine, with the code of this checkout where it is seen there."""
    searched = [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    program = "from wellfed.study.executors.remote import main; main()"
    return ProcessStart(program, str(Path.cwd()), (*map(str, project.import_paths()), *searched))


def needs_of(settings: StudySettings, alive: Path) -> Needs:
    """Returns what a study here needs of a machine."""
    return Needs(
        study=str(settings.folder.absolute()),
        alive=str(alive.absolute()),
        project=str(project.root()),
        source=project.source_digest(),
        code=code_version(own_git_state(), engine_state()),
        argv=(str(Path(sys.argv[0]).absolute()), *sys.argv[1:]),
    )


def order_of(needs: Needs, settings: StudySettings, trial: Trial) -> bytes:
    """Returns what `main` reads from standard input: a line of JSON, then the pickled settings and trial."""
    there = replace(settings, folder=Path(needs.study), say=_ignore, tick=_ignore, see_machine=_ignore)
    return json.dumps(asdict(needs)).encode() + b"\n" + pickle.dumps((replace(there, stop=StopRequest()), trial))


def _ignore(*given: object) -> None:
    """Does nothing: only the study's own process has a user."""


def main() -> None:
    """Reads a trial from standard input, runs it and writes its pickled row to standard output.

    Exits with code 1 and the reason as the last line of standard error if this machine can't run it.
    """
    die_with_parent(os.getppid())
    with contextlib.suppress(OSError):  # Ray's workers have a low priority; not every user may raise it again
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    needs = Needs(**json.loads(sys.stdin.buffer.readline()))
    os.environ[project.VARIABLE] = needs.project
    sys.argv = list(needs.argv)
    if problem := find_problem(needs):
        sys.exit(problem)
    settings, trial = pickle.load(sys.stdin.buffer)
    with answers:
        answers.write(pickle.dumps(_run(settings, trial, Path(needs.alive))))


def closed_by(alive: Path) -> Path:
    """Returns the file whose existence says that no further trial of the study starts."""
    return alive.with_name(f"{alive.name}.closed")


def find_problem(needs: Needs) -> str:
    """Returns why this machine can't run trials of the study; empty if it can."""
    if not MAY_FORK:
        return "trials are forked, which its system does not offer."
    if (source := project.source_digest()) != needs.source:
        here = code_version(own_git_state(), engine_state())
        versions = "with changes of its own" if here == needs.code else f"{here}, and the study has {needs.code}"
        return (
            f"it has other code ({project.root()}: {versions}; digest {source}, not {needs.source}). "
            "Bring it to the same, or share the folder of the project."
        )
    end_s = time.monotonic() + _SEEN_WITHIN_S
    while not Path(needs.alive).exists():
        if time.monotonic() > end_s:
            return f"it does not see the study's folder {needs.study}. Put paths.log_dir on a disk that all share."
        time.sleep(0.5)
    if closed_by(Path(needs.alive)).exists():
        return "no further trial is started."
    if not os.access(needs.study, os.W_OK):
        return f"it can't write to the study's folder {needs.study}. Give it the right to, or mount it for writing."
    return ""


def _run(settings: StudySettings, trial: Trial, alive: Path) -> object:
    """Returns the row of a trial, however it ends."""
    log = settings.folder / f"shared_{socket.gethostname()}_{os.getpid()}.log"

    def check_alive() -> None:
        if not alive.exists():
            sys.exit("the study is over.")

    prepare_to_fork(RunConfig())
    try:
        with tempfile.TemporaryDirectory(prefix="wellfed-node-") as scratch:
            here = replace(settings, scratch=Path(scratch), tick=check_alive)
            with LocalExecutor(here, partial(open_trial_folder, check=check_alive), lambda number: log) as executor:
                ((_, row),) = executor.run([trial])
        return row
    finally:
        if log.exists() and not log.stat().st_size:
            log.unlink()
