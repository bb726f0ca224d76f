"""Trains both sides of a bench in turns, and computes the ratio of their times from the rounds.

Each run is a process of its own, started as a user would start it, so that the code of either side is imported afresh.
A round runs both sides once, in another order than the round before, so drift of the machine cancels in its ratio. The
rate of a run is that of its measured steps. Starting, warm-up, validations and checkpoints don't count.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from wellfed import project
from wellfed.config.quoting import assigned
from wellfed.errors import Fault
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison, Ratio
from wellfed.explain.report.slowdown import reasons_against
from wellfed.masking import masked_override
from wellfed.observe.timing.interval import mean_ratio
from wellfed.process import die_with_parent
from wellfed.record import RunRecord, differences, plain, write_atomically
from wellfed.study.bench.bench_sides import BenchSide
from wellfed.study.ledger import in_turn

FEW_ROUNDS = 5
"""Rounds below which the interval is wide: Student's t of 4 ratios is 3.2, of 2 ratios 12.7."""
RESULT = "bench.json"
_PATIENCE_S = 30.0
"""Seconds that a run which is asked to stop may take to write its record."""
_LAST_BYTES = 4096


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
    """Gets the record and what the runs print."""
    runs: Path
    """Gets the run folders."""
    ended: Callable[[int, BenchRound], None]
    """Called with the number and result of each round."""
    rounds: list[BenchRound] = field(default_factory=list, init=False)
    faults: list[Fault] = field(default_factory=list, init=False)
    """Reasons against a verdict."""
    _code: str = field(default="", init=False)
    """Digest of the working tree's code at the start."""

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
        """Runs the rounds, and writes the record after each.

        Raises:
            Stopped: a signal asked for it. No run is left.
        """
        self.write()
        self._code = project.source_digest()
        for number in range(1, self.number + 1):
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
        if project.source_digest() != self._code:
            problem = f"had changed by the end of round {number}: the rounds would be of different code."
            self.faults.append(Fault("the working tree", problem, "Leave it alone until the bench has ended."))
        pair = Comparison(Evidence(found["A"]), Evidence(found["B"]))
        self.faults += reasons_against(pair, settings_may_differ=True)
        for record, first in zip(pair.records, self.rounds[0].pair.records if self.rounds else (), strict=False):
            self.faults += [
                Fault(name, f"was {before} in round 1 and is {now} in round {number}.", "Leave the files alone.")
                for name, before, now in differences(first.config, record.config)
            ]
        if not self.faults:
            folders = {side.letter: str(self._run_folder(side, number)) for side in self.sides}
            self.rounds.append(BenchRound(order, pair, folders))
            self.ended(number, self.rounds[-1])

    def _run_folder(self, side: BenchSide, number: int) -> Path:
        return self.runs / f"{self.folder.name}_{number}{side.letter}"

    def _train(self, side: BenchSide, number: int) -> RunRecord | None:
        """Returns the record of a run of one side; None if it did not end well, which is a fault."""
        folder, log = self._run_folder(side, number), self.folder / f"{number}{side.letter}.log"
        command = [sys.executable, str(side.script), *side.overrides, assigned("hydra.run.dir", str(folder))]
        code = _end_of(command, log)
        record: RunRecord | None = None
        with suppress(OSError, ValueError):
            record = RunRecord.read(folder)
        if code == 0 and record is not None and record.status == "ok":
            return record
        error = record.error if record else None
        why = error["message"] if error else _last_line(log) or "it left no record"
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        problem = f"failed in round {number} ({ended}): {' '.join(why.split())}"
        self.faults.append(Fault(f"{side.letter}, {side.title}", problem, f"What it printed: {log}"))
        return None

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
        write_atomically(self.folder / RESULT, json.dumps(plain(known), indent=1) + "\n")


def bench_name() -> str:
    """Returns a name for a bench, which its runs begin with: the time, so that they are listed by it."""
    now = datetime.now()
    return f"{now:%Y-%m-%d_%H-%M-%S}_{now.microsecond * 0x10000 // 1_000_000:04x}_bench"


def _end_of(command: Sequence[str], log: Path) -> int:
    """Returns the exit code of a process, negative for a signal; ends it if this process is asked to stop."""
    apart: dict[str, Any] = {}
    if os.name == "posix":  # Ctrl-C reaches this process alone, which ends the run
        apart = {"start_new_session": True, "preexec_fn": partial(die_with_parent, os.getpid())}
    with log.open("wb") as printed:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, **apart)
        try:
            return process.wait()
        except BaseException:
            _stop(process)
            raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks a run to stop, as Ctrl-C does, and ends what is left of it after some time."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_bytes()[-_LAST_BYTES:].decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
