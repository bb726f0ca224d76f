"""Trains both sides of a bench in turns, and computes the ratio of their times from the rounds.

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
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from wellfed import project
from wellfed.config.quoting import assigned
from wellfed.errors import Fault
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison, Ratio
from wellfed.explain.report.slowdown import reasons_against
from wellfed.masking import hidden, hidden_in, masked_override
from wellfed.observe.timing.interval import mean_ratio
from wellfed.process import die_with_parent
from wellfed.record.entries import RunRecord
from wellfed.record.files import plain, write_atomically
from wellfed.run.folder.resume import CHECKPOINTS
from wellfed.study.bench.bench_sides import BenchSide
from wellfed.study.ledger import in_turn
from wellfed.study.trial_end import last_lines

ROUNDS = 6
"""Default number of rounds. Even, so that drift cancels. Student's t is 2.6 for 6 ratios, 4.3 for 3, 12.7 for 2."""
RESULT = "bench.json"
_PATIENCE_S = 30.0
"""Seconds that a run which is asked to stop may take to write its record."""
_OF_RANKS = (
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables by which a run takes itself for a rank of another."""


@dataclass(frozen=True)
class BenchRound:
    """Both sides, trained once each."""

    order: str
    """``AB`` or ``BA``."""
    pair: Comparison
    folders: dict[str, str]
    """Run folder of each side."""

    @property
    def rates(self) -> tuple[float, float]:
        """Samples per second of A and B."""
        a, b = (record.throughput for record in self.pair.records)
        assert a is not None
        assert b is not None
        return a["samples_per_s"], b["samples_per_s"]

    @property
    def time_ratio(self) -> float:
        """Time a sample of B over that of A."""
        return self.rates[0] / self.rates[1]


@dataclass
class Bench:
    """Rounds of one command. ``run`` goes on until all are done, or one shows that there can be no verdict."""

    sides: tuple[BenchSide, BenchSide]
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
        if not self.rounds:
            return None
        factor, between = mean_ratio([each.time_ratio for each in self.rounds])
        if between is not None:
            return Ratio(factor, *between)
        rate = self.rounds[0].pair.rate
        return None if rate is None else rate.inverse

    @property
    def median(self) -> float:
        """Median of the rounds' ratios; there must be one."""
        return statistics.median(each.time_ratio for each in self.rounds)

    def run(self) -> None:
        """Runs the rounds, and writes the record after each. Round 0 only fills caches.

        Raises:
            Stopped: a signal asked for it. No run is left.
        """
        self.write()
        for number in range(self.number + 1):
            sides = in_turn(self.sides, number - 1)
            found: dict[str, RunRecord] = {}
            for side in sides:
                if (record := self._train(side, number)) is None:
                    break
                found[side.letter] = record
            if len(found) == len(sides):
                self._add(number, "".join(side.letter for side in sides), found)
            self.write()
            if self.faults:
                return

    def _add(self, number: int, order: str, found: dict[str, RunRecord]) -> None:
        """Adds a round if both runs did the same work, and what the first round did."""
        pair = Comparison(Evidence(found["A"]), Evidence(found["B"]))
        self.faults += reasons_against(pair, settings_may_differ=True)
        if not self.faults and number > 0:
            folders = {side.letter: str(self._run_folder(side, number)) for side in self.sides}
            self.rounds.append(BenchRound(order, pair, folders))
            self.ended(number, self.rounds[-1])

    def _run_folder(self, side: BenchSide, number: int) -> Path:
        return self.folder / f"{number}{side.letter}"

    def _train(self, side: BenchSide, number: int) -> RunRecord | None:
        """Returns the record of a run of one side; None if it did not end well, which is a fault."""
        folder = self._run_folder(side, number)
        log = folder.with_suffix(".log")
        command = [sys.executable, str(side.script), *side.overrides, assigned("hydra.run.dir", str(folder))]
        try:
            code = self._end_of(command, log, [str(side.script.parent), *map(str, project.import_paths()[1:])])
        finally:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            with suppress(OSError):
                log.write_text(hidden(log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
        record: RunRecord | None = None
        with suppress(OSError, ValueError):
            record = RunRecord.read(folder)
        if code == 0 and record is not None and record.status == "ok":
            return record
        error = record.error if record else None
        why = error["message"] if error else " ".join(last_lines(log, 1)) or "it left no record"
        ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        problem = f"failed in round {number} ({ended}): {' '.join(why.split())}"
        self.faults.append(Fault(f"{side.letter}, {side.title}", problem, f"What it printed: {log}"))
        return None

    def _end_of(self, command: Sequence[str], log: Path, python_path: Sequence[str]) -> int:
        """Returns the exit code of a process, negative for a signal. Nothing that it started is left."""
        with log.open("wb") as printed:
            process = subprocess.Popen(
                command,
                env=_own_environment(python_path),
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

    def write(self) -> None:
        """Writes what is known so far."""
        ratio = self.ratio
        known = {
            "schema": 1,
            "rounds_asked": self.number,
            "sides": {
                side.letter: {
                    "title": side.title,
                    "commit": side.commit,
                    "changed": side.is_changed,
                    "overrides": [*map(masked_override, side.overrides)],
                }
                for side in self.sides
            },
            "rounds": [
                {
                    "order": each.order,
                    "samples_per_s": dict(zip("AB", each.rates, strict=True)),
                    "time_ratio": each.time_ratio,
                    "runs": each.folders,
                }
                for each in self.rounds
            ],
            "time_ratio": None
            if ratio is None
            else {"median": self.median, "mean": ratio.factor, "ci95": [ratio.low, ratio.high]},
            "problems": [str(fault) for fault in self.faults],
        }
        write_atomically(self.folder / RESULT, json.dumps(hidden_in(plain(known)), indent=1) + "\n")


def _own_environment(python_path: Sequence[str]) -> dict[str, str]:
    """Returns the variables of a process that trains by itself, where this process may be a rank of another run.

    Args:
        python_path: folders that are searched first for modules.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    return {**kept, "PYTHONPATH": os.pathsep.join([*python_path, *filter(None, [kept.get("PYTHONPATH")])])}
