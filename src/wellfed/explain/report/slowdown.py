"""Judges whether a run is slower than a reference, for CI. A verdict needs runs that do the same work:
`reasons_against` lists what differs, and `disturbances` what the machine did meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wellfed.errors import Fault
from wellfed.explain.report.comparison import Comparison, Ratio, device
from wellfed.explain.report.run_lines import show_value
from wellfed.observe.timing.interval import MIN_STEPS
from wellfed.record.entries import RunRecord, differences
from wellfed.units import show_percent

_APART = (
    *("workload.", "paths.", "seed.", "resume.", "rerun.", "sweep.", "search."),
    *(f"logger.{name}." for name in ("project", "entity", "group", "name", "tags", "mlflow_uri")),
)
"""Settings that are judged by `Comparison.of_other_learning`, and those that don't change the work of a step."""
_DISTURBED = ("busy_machine", "machine_was_slower")
"""Findings that explain a rate by the machine."""
_OTHER_LENGTH_FRAC = 0.1
"""Largest share by which the measured steps may differ, since rates change while a run lasts."""


@dataclass(frozen=True)
class Slowdown:
    """Time a sample of B over that of A, against a limit."""

    ratio: Ratio
    limit_frac: float
    """Largest permitted slowdown: 0.05 = 5 % more time a sample."""

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
            return f"Within {limit}: {self.measured}."
        return f"Not told apart: {self.measured}, which includes {limit}."

    @property
    def measured(self) -> str:
        """The slowdown with its interval, without a full stop."""
        more = self.ratio.factor - 1
        text = f"B takes {show_percent(abs(more))} {'less' if more < 0 else 'more'} time a sample than A"
        if self.ratio.low is None or self.ratio.high is None:
            return text
        low, high = (f"{100 * (end - 1):+.1f} %" for end in (self.ratio.low, self.ratio.high))
        return f"{text} (95 % interval {low} {'or more' if self.ratio.high == math.inf else f'to {high}'})"


def reasons_against(pair: Comparison, *, settings_may_differ: bool = False) -> Iterator[Fault]:
    """Yields every reason why the rates of two runs allow no verdict; none if both do the same work."""
    a, b = pair.records
    for letter, record in (("A", a), ("B", b)):
        if record.status != "ok":
            yield Fault(letter, f"has the status {record.status}.", "Name a run that ended well.")
        elif record.throughput is None or record.throughput["ci95"] is None:
            few = f"has too few measured steps: an interval needs {MIN_STEPS}."
            yield Fault(letter, few, f"Train more steps: trainer.max_steps={5 * MIN_STEPS}.")
    steps = [record.throughput["steps"] for record in pair.records if record.throughput and record.throughput["ci95"]]
    if len(steps) == 2 and abs(steps[0] - steps[1]) > _OTHER_LENGTH_FRAC * max(steps):
        yield Fault("number of measured steps", _both(*steps), "End both by trainer.max_steps, or alike.")
    for line in pair.of_other_learning:
        yield Fault("workload", line, "Compare runs that learn the same from the same data.")
    for name, of_a, of_b in differences(_work(a), _work(b)):
        yield Fault(name, _both(of_a, of_b), "Run both on one machine and the same data, as wellfed bench does.")
    typed = {name for name, *_ in differences(a.config, b.config)}
    others = [one.name for one in pair.settings if one.name in typed and not f"{one.name}.".startswith(_APART)]
    if others and not settings_may_differ and "script" not in a.config:  # a script's settings are part of its code
        yield Fault("settings", f"differ: {', '.join(others)}.", "Run both with the same settings.")


def disturbances(pair: Comparison) -> Iterator[Fault]:
    """Yields findings by which a rate shows the state of the machine: judged runs need a quiet one."""
    for letter, record in zip("AB", pair.records, strict=True):
        for found in record.findings:
            is_hot = found["id"] == "clocks_limited" and found["evidence"].get("limited_by") == "heat"
            if is_hot or found["id"] in _DISTURBED:
                yield Fault(letter, f"has {found['id']}. {found['message'].rstrip('.')}.", "Run both again.")


def _work(record: RunRecord) -> dict[str, Any]:
    """Returns facts that two runs of the same work share: machine, ranks, values derived from the data, and the
    arguments of a script."""
    return {
        "device": device(record),
        "cores": record.machine.get("cpu_quota_cores"),
        "host": record.boot_id or record.host_name,
        "ranks": max(1, len(record.ranks)),
        **record.derived(),
        "arguments": " ".join(record.overrides) if "script" in record.config else None,
        "trained parameters": record.process and record.process["parameter_values"],
    }


def _both(a: Any, b: Any) -> str:
    a, b = (value if isinstance(value, str) else show_value(value) for value in (a, b))
    return f"is {a} in A and {b} in B."
