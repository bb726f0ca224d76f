"""Decides whether one run takes more time a sample than another, beyond noise and by more than a limit.

``report A B --max-slower 5%`` compares two runs, `wellfed.study.bench` many in turns. A verdict needs runs that do the
same work: `reasons_against` lists what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wellfed.errors import Fault
from wellfed.explain.report.comparison import Comparison, Ratio, device
from wellfed.observe.timing.interval import MIN_STEPS
from wellfed.units import show_percent

_OF_MACHINE = ("gpus", "cpu", "cpu_quota_cores")
"""Entries of the machine that must be equal. Two hosts of one kind are not told apart."""
_APART = ("workload", "paths", "seed", "resume", "rerun")
"""Settings that are judged by `Comparison.of_other_learning`, and those that don't change the work of a step."""


@dataclass(frozen=True)
class Slowdown:
    """Time a sample of B over that of A, against a limit."""

    ratio: Ratio
    limit_frac: float
    """Largest permitted slowdown: 0.05 = 5 % more time a sample."""
    letter: str = "B"
    """Name of the run that may be slower."""

    @property
    def is_beyond_limit(self) -> bool:
        """Whether the whole interval is above the limit."""
        return self.ratio.low is not None and self.ratio.low > 1 + self.limit_frac

    @property
    def is_within_limit(self) -> bool:
        """Whether the whole interval is at or below the limit."""
        return self.ratio.high is not None and self.ratio.high <= 1 + self.limit_frac

    @property
    def verdict(self) -> str:
        """Sentence with the slowdown, its interval and the limit."""
        limit = f"the limit of {100 * self.limit_frac:g} %"
        if self.is_beyond_limit:
            return f"Slower: {self.measured}, which is above {limit}."
        if self.is_within_limit:
            return f"Not slower: {self.measured}, which is within {limit}."
        return f"Not told apart: {self.measured}, which includes {limit}. More steps or rounds narrow the interval."

    @property
    def measured(self) -> str:
        """The slowdown with its interval, without a full stop."""
        more = self.ratio.factor - 1
        text = f"{self.letter} takes {show_percent(abs(more))} {'less' if more < 0 else 'more'} time a sample than A"
        if self.ratio.low is None or self.ratio.high is None:
            return text
        low, high = (f"{100 * (end - 1):+.1f} %" for end in (self.ratio.low, self.ratio.high))
        return f"{text} (95 % interval {low} {'or more' if self.ratio.high == math.inf else f'to {high}'})"


def reasons_against(pair: Comparison, *, settings_may_differ: bool = False) -> Iterator[Fault]:
    """Yields every reason why the rates of two runs allow no verdict; none if they do the same work alike.

    Args:
        settings_may_differ: whether the settings are what is compared.
    """
    for letter, record in zip(("A", pair.letter), pair.records, strict=True):
        if record.status != "ok":
            how = "still runs" if record.status == "running" else f"ended as {record.status}"
            yield Fault(letter, f"{how}.", "Name a run that ended well.")
        elif record.throughput is None or not 0 < record.throughput["samples_per_s"] < math.inf:
            yield Fault(letter, "has no rate: all its steps were warm-up.", "Train more steps: trainer.max_steps=100.")
        elif record.throughput["ci95"] is None and not settings_may_differ:
            has = f"has {record.throughput['steps']} measured steps, and an interval needs {MIN_STEPS}."
            yield Fault(letter, has, f"Train more steps: trainer.max_steps={5 * MIN_STEPS}.")
    for line in pair.of_other_learning:
        yield Fault("workload", line, "Compare runs that learn the same from the same data.")
    a, b = pair.records
    if device(a) != device(b):
        yield _differs("device", (device(a), device(b)), pair.letter, "Run both on the same device.")
    for one in pair.machine:
        if one.name in _OF_MACHINE and not (device(a) != device(b) and one.name in ("gpus", "cpu")):
            yield _differs(f"machine.{one.name}", one.shown, pair.letter, "Run both on the same machine.")
    for one in () if settings_may_differ else pair.settings:
        if one.name.partition(".")[0] not in _APART:
            yield _differs(one.name, one.shown, pair.letter, "Run both with the same setting.")


def _differs(name: str, shown: Sequence[str], letter: str, way_out: str) -> Fault:
    return Fault(name, f"is {shown[0]} in A and {shown[1]} in {letter}.", way_out)
