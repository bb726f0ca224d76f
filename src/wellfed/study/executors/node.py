"""Runs one trial on a machine that Ray or Slurm has chosen, with a local executor there.

This is the process that `trial_process` starts. It makes the trial's row, since its files lie here: another machine may
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from wellfed import project
from wellfed.config.schema import RunConfig
from wellfed.process import MAY_FORK, StopRequest, die_with_parent
from wellfed.record import engine_state
from wellfed.run.train import own_git_state
from wellfed.study.executors.executor import StudySettings, Trial
from wellfed.study.executors.local import LocalExecutor, open_trial_folder, prepare_to_fork
from wellfed.study.executors.trial_process import ProcessStart
from wellfed.study.trial_end import code_version

_SEEN_WITHIN_S = 15
"""Time for a new file to appear on another machine. After it the folder is taken for another one."""


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
    program = "from wellfed.study.executors.node import main; main()"
    return ProcessStart(program, str(Path.cwd()), (*map(str, project.import_paths()), *searched))


def needs_of(settings: StudySettings, alive: Path) -> Needs:
    """Returns what a study here needs of a machine."""
    return Needs(
        study=str(settings.folder.absolute()),
        alive=str(alive.absolute()),
        project=str(project.root()),
        source=project.source_digest(),
        code=settings.code,
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
