"""Trains another commit and the working tree in turns, and computes the ratio of their times (``wellfed bench``).

Each run is a process of its own, started as a user would start it, so that the code of either side is imported afresh.
A round runs both sides once, in another order than the round before. So a steady drift of the machine cancels over two
rounds. One run of each side comes first and does not count: it fills caches. The rate of a run is that of its measured
steps. Starting, warm-up, validations and checkpoints don't count.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from wellfed import project
from wellfed.command_line import command
from wellfed.config.quoting import assigned
from wellfed.errors import ConfigError, Fault
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison, Ratio
from wellfed.explain.report.slowdown import reasons_against
from wellfed.masking import hidden, hidden_in, masked_override
from wellfed.observe.timing.interval import mean_ratio
from wellfed.process import die_with_parent
from wellfed.record.entries import RunRecord
from wellfed.record.files import plain, write_atomically
from wellfed.record.provenance import git_output, git_state
from wellfed.run.folder.resume import CHECKPOINTS
from wellfed.study.rows import in_turn
from wellfed.study.trial_end import last_lines, record_of

ROUNDS = 6
"""Default number of rounds. Even, so that drift cancels. Student's t is 2.6 for 6 ratios, 4.3 for 3, 12.7 for 2."""
RESULT = "bench.json"
_SCRIPT = Path("src", "train.py")
_GIT_S = 600
"""Most seconds that git may take, as to check out a commit."""
_PATIENCE_S = 30.0
"""Seconds that a run which is asked to stop may take to write its record."""


@dataclass(frozen=True)
class BenchSide:
    """Code that is trained in every round."""

    letter: str
    title: str
    project: Path
    """Folder whose ``src/train.py`` runs."""
    commit: str | None
    is_changed: bool = False
    """Whether there are uncommitted changes beside the commit."""


@dataclass(frozen=True)
class BenchRound:
    """Both sides, trained once each."""

    order: str
    """``AB`` or ``BA``."""
    pair: Comparison

    @property
    def rates(self) -> list[float]:
        """Samples per second of A and B."""
        return [record.throughput["samples_per_s"] for record in self.pair.records if record.throughput is not None]

    @property
    def time_ratio(self) -> float:
        """Time a sample of B over that of A."""
        return self.rates[0] / self.rates[1]


@dataclass
class Bench:
    """Rounds of one command. ``run`` goes on until all are done, or one shows that there can be no verdict."""

    sides: tuple[BenchSide, BenchSide]
    overrides: Sequence[str]
    number: int
    """Rounds to run."""
    folder: Path
    """Gets the record, the run folders and what the runs print."""
    ended: Callable[[int, BenchRound], None]
    """Called with the number and result of each round."""
    rounds: list[BenchRound] = field(default_factory=list, init=False)
    faults: list[Fault] = field(default_factory=list, init=False)
    """Reasons against a verdict."""

    @property
    def ratio(self) -> Ratio | None:
        """Time a sample of B over that of A: geometric mean of the rounds. A single round has the interval of its
        steps."""
        if len(self.rounds) == 1 and (rate := self.rounds[0].pair.rate) is not None:
            return rate.inverse
        if not self.rounds:
            return None
        factor, between = mean_ratio([each.time_ratio for each in self.rounds])
        return Ratio(factor, *(between or ()))

    def run(self) -> None:
        """Runs the rounds, and writes the record after each. Round 0 only fills caches.

        Raises:
            Stopped: a signal asked for it. No run is left.
        """
        self.write()
        for number in range(self.number + 1):
            found: dict[str, RunRecord] = {}
            for side in in_turn(self.sides, number - 1):
                if not self.faults and (record := self._train(side, self.folder / f"{number}{side.letter}")):
                    found[side.letter] = record
            if len(found) == len(self.sides):
                pair = Comparison(Evidence(found["A"]), Evidence(found["B"]))
                self.faults += reasons_against(pair, settings_may_differ=True)
                if not self.faults and number > 0:
                    self.rounds.append(BenchRound("".join(found), pair))
                    self.ended(number, self.rounds[-1])
            self.write()
            if self.faults:
                return

    def _train(self, side: BenchSide, folder: Path) -> RunRecord | None:
        """Returns the record of a run of one side; None if it did not end well, which is a fault."""
        script, log = side.project / _SCRIPT, folder.with_suffix(".log")
        typed = [sys.executable, str(script), *self.overrides, assigned("hydra.run.dir", str(folder))]
        try:
            code = _exit_code(typed, log, [str(script.parent), *map(str, project.import_paths()[1:])])
        finally:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            log.write_text(hidden(log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
        record = record_of(folder)
        if code == 0 and record is not None and record.status == "ok":
            return record
        error = record.error if record else None
        why = error["message"] if error else " ".join(last_lines(log, 1)) or "it left no record"
        ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        problem = f"failed in round {folder.name[:-1]} ({ended}): {' '.join(why.split())}"
        self.faults.append(Fault(f"{side.letter}, {side.title}", problem, f"What it printed: {log}"))
        return None

    def write(self) -> None:
        """Writes what is known so far."""
        ratio = self.ratio
        sides = {
            side.letter: {"title": side.title, "commit": side.commit, "changed": side.is_changed} for side in self.sides
        }
        rounds = [
            {
                "order": each.order,
                "samples_per_s": dict(zip("AB", each.rates, strict=True)),
                "time_ratio": each.time_ratio,
                "runs": {letter: str(self.folder / f"{number}{letter}") for letter in "AB"},
            }
            for number, each in enumerate(self.rounds, start=1)
        ]
        known = {
            "schema": 1,
            "rounds_asked": self.number,
            "overrides": [*map(masked_override, self.overrides)],
            "sides": sides,
            "rounds": rounds,
            "time_ratio": None if ratio is None else {"mean": ratio.factor, "ci95": [ratio.low, ratio.high]},
            "problems": [str(fault) for fault in self.faults],
        }
        write_atomically(self.folder / RESULT, json.dumps(hidden_in(plain(known)), indent=1) + "\n")


def _exit_code(typed: Sequence[str], log: Path, python_path: Sequence[str]) -> int:
    """Runs a process and returns its exit code; nothing that it started is left.

    Args:
        python_path: folders that are searched first for modules.
    """
    paths = [*python_path, *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as printed:
        process = subprocess.Popen(
            typed,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the run
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  a bench has one thread
        )
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        raise
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def two_sides(against: str) -> Iterator[tuple[BenchSide, BenchSide]]:
    """Yields A, another commit, and B, the working tree. The worktree of A exists within the block alone.

    Raises:
        ConfigError: there is no such commit, or no project in it.
    """
    root, where = project.root(), f"--against {masked_override(against)}"

    def git(*words: str, problem: str, way_out: str) -> str:
        try:
            return git_output(root, *words, timeout_s=_GIT_S).strip()
        except (OSError, subprocess.SubprocessError) as error:
            printed = getattr(error, "stderr", None) or error
            said = " ".join(str(printed).split()).rstrip(".")
            raise ConfigError.of(where, problem.format(said), way_out) from error

    way_out = "Commit the project: git init, git add, git commit."
    problem = f"names a commit, and git has none of {root}: {{}}."
    top = Path(git("rev-parse", "--show-toplevel", problem=problem, way_out=way_out))
    way_out = "git log lists commits. A shallow clone has the newest alone: git fetch --unshallow."
    if "=" in against:
        way_out = f"Compare settings by a sweep: {command('train')} -m sweep=quick loader=baseline,balanced"
    problem = "is no commit, branch or tag of this repository."
    words = ("rev-parse", "--verify", "--end-of-options", f"{against}^{{commit}}")
    commit = git(*words, problem=problem, way_out=way_out)
    scratch = Path(tempfile.mkdtemp(prefix="wellfed-bench-"))
    tree = scratch / "tree"
    try:
        hooks = ("-c", "core.hooksPath=/dev/null")  # a user's hook may install or start something
        added = (*hooks, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        git(*added, problem="can't be checked out: {}.", way_out="Make room, or check it out.")
        folder = tree / root.resolve().relative_to(top.resolve())
        if not (folder / _SCRIPT).is_file():
            raise ConfigError.of(where, f"has no {_SCRIPT}.", "Name a commit that has the project.")
        state = git_state(root)
        title = commit[:10] if commit.startswith(against) else f"{against} ({commit[:10]})"
        here = (state["commit"], state["dirty"]) if state else (None, False)
        yield BenchSide("A", title, folder, commit), BenchSide("B", "the working tree", root, *here)
    finally:
        # `git worktree prune` would also remove worktrees of the user on a disk that is not mounted now.
        with suppress(OSError):
            shutil.rmtree(tree / (tree / ".git").read_text(encoding="utf-8").removeprefix("gitdir:").strip())
        shutil.rmtree(scratch, ignore_errors=True)
