"""Compares two runs: which settings, machines and figures differ, and which difference of the rates is only noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.gains.device_load import used_cards
from wellfed.explain.report.figures import FIGURES, Estimate, Figure, figures_of, sample_unit
from wellfed.explain.report.run_lines import show_figure, show_value, simulated_line
from wellfed.record.entries import RunRecord, differences, filled_in
from wellfed.units import counted, show_duration, show_factor


@dataclass(frozen=True)
class Ratio:
    """Ratio of a figure of B to that of A."""

    factor: float
    low: float | None = None
    """Lower end of the 95 % interval; None without one, as `high`."""
    high: float | None = None

    @classmethod
    def of(cls, a: Estimate | None, b: Estimate | None) -> Ratio | None:
        """Returns the ratio of two independent figures; None if one is missing or not above 0.

        The interval is that of a difference of logarithms, from the limits of both (MOVER: Zou and Donner, Statistics
        in Medicine 27, 2008). If the interval of a figure reaches 0, the ratio has no bound on that side.
        """
        if a is None or b is None or not (0 < a.value < math.inf and 0 < b.value < math.inf):
            return None
        factor = b.value / a.value
        if a.interval is None or b.interval is None:
            return cls(factor)
        (a_low, a_high), (b_low, b_high) = a.interval, b.interval
        below_a = math.log(a.value / a_low) if a_low > 0 else math.inf
        below_b = math.log(b.value / b_low) if b_low > 0 else math.inf
        down = math.hypot(below_b, math.log(a_high / a.value))
        up = math.hypot(math.log(b_high / b.value), below_a)
        return cls(factor, factor * math.exp(-down), factor * math.exp(up))  # exp(inf) is inf

    @property
    def is_told_apart(self) -> bool | None:
        """Whether 1 is outside the interval; None without an interval."""
        return None if self.low is None or self.high is None else not self.low <= 1 <= self.high

    @property
    def between(self) -> str:
        """The interval as text; empty without one."""
        if self.low is None or self.high is None:
            return ""
        if self.high == math.inf:
            return f"{show_factor(self.low)} or more"
        return f"{show_factor(self.low)} to {show_factor(self.high)}"

    @property
    def inverse(self) -> Ratio:
        """Ratio of A to B."""
        if self.low is None or self.high is None:
            return Ratio(1 / self.factor)
        return Ratio(1 / self.factor, 1 / self.high, 1 / self.low if self.low > 0 else math.inf)

    @property
    def times(self) -> str:
        """The factor as text."""
        return f"{show_factor(self.factor)} times" if self.factor >= 0.01 else "under 0.01 times"

    def __str__(self) -> str:
        if self.is_told_apart is False:
            return f"not told apart ({self.between})"
        return f"{self.times} ({self.between})" if self.between else self.times


@dataclass(frozen=True)
class Compared:
    """Figure or setting of both runs."""

    name: str
    shown: Sequence[str]
    """Texts of A and B; empty: not measured."""
    ratio: Ratio | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs, A and B; their records must have been judged."""

    a: Evidence
    b: Evidence

    @property
    def records(self) -> tuple[RunRecord, RunRecord]:
        """Records of both runs."""
        return self.a.record, self.b.record

    @cached_property
    def verdict(self) -> str:
        """Sentence that names the faster run."""
        rate = self.rate
        if self.of_other_work:
            return f"The rates of A and B are not compared. {self.of_other_work[0]}"
        if rate is None:
            return "There are no two rates to compare."
        if rate.is_told_apart is False:
            both = f"that of B is {rate.times} that of A"
            return f"The rates are not told apart: {both} (95 % interval {rate.between})."
        first, second, shown = ("B", "A", rate) if rate.factor >= 1 else ("A", "B", rate.inverse)
        between = f" (95 % interval {shown.between})" if shown.between else "; too few steps to tell that from chance"
        return f"{first} trains {shown.times} as fast as {second}{between}."

    @cached_property
    def of_each(self) -> tuple[dict[str, Figure], dict[str, Figure]]:
        """Figures of A and B, by their keys."""
        a, b = self.records
        return figures_of(a), figures_of(b)

    @cached_property
    def rate(self) -> Ratio | None:
        """Ratio of samples per second; None where samples are not the same."""
        return self._ratio("rate")

    def _ratio(self, key: str) -> Ratio | None:
        a, b = (figures[key].estimate if key in figures else None for figures in self.of_each)
        return Ratio.of(a, b) if len({(one.workload, sample_unit(one)) for one in self.records}) == 1 else None

    @cached_property
    def caveats(self) -> list[str]:
        """Reasons against comparing figures of the two."""
        a, b = self.records
        told = [
            f"{name} has the status {one.status}: its figures are those until then."
            for name, one in (("A", a), ("B", b))
            if one.status != "ok"
        ]
        told += dict.fromkeys(filter(None, map(simulated_line, self.records)))
        if a.metrics and b.metrics and (a.steps, a.seed) != (b.steps, b.seed):
            of_a, of_b = counted(a.steps, "step"), counted(b.steps, "step")
            told.append(f"Metrics are those after {of_a} with seed {a.seed}, and {of_b} with {b.seed}.")
        return [*told, *self.of_other_work]

    @cached_property
    def of_other_learning(self) -> list[str]:
        """Differences of workload and data, with which the two do other work."""
        a, b = self.records
        if a.workload != b.workload:
            return [f"Different workloads, {a.workload} and {b.workload}: rates and metrics are of different work."]
        if sample_unit(a) != sample_unit(b):
            return [f"Samples are {sample_unit(a)} in A and {sample_unit(b)} in B: rates have no ratio."]
        names = [name for name, *_ in differences(a.config.get("workload"), b.config.get("workload"), "workload")]
        told = f"What is learned differs ({', '.join(names)}): times and metrics are of different work."
        return [told] if names else []

    @cached_property
    def of_other_work(self) -> list[str]:
        """Differences of data and device, with which a ratio of the rates shows no effect of the settings."""
        a, b = map(device, self.records)
        told = f"Different devices, {a} and {b}: settings are not all that differs."
        return [*self.of_other_learning, *([told] if a and b and a != b else [])]

    @cached_property
    def settings(self) -> list[Compared]:
        """Settings that differ as they were in effect: as planned, else as configured."""
        planned = ({knob: one["value"] for knob, one in record.plan.items()} for record in self.records)
        a, b = (filled_in(one.config, values) for one, values in zip(self.records, planned, strict=True))
        return _shown(differences(a, b))

    @cached_property
    def machine(self) -> list[Compared]:
        """Hardware, versions and code."""
        a, b = map(_machine, self.records)
        return _shown(differences(a, b))

    @cached_property
    def figures(self) -> list[Compared]:
        """How both ended, and the figures that one of them has."""
        a, b = self.of_each
        return [
            Compared("status", [one.status for one in self.records]),
            Compared("steps", [f"{one.steps:,}" for one in self.records]),
            Compared("time, all in all", [show_duration(one.duration_s) for one in self.records]),
            *(
                Compared(
                    (a.get(key) or b[key]).label,
                    [of[key].shown if key in of else "" for of in (a, b)],
                    self._ratio(key),
                )
                for key in FIGURES
                if key in a or key in b
            ),
        ]

    @cached_property
    def metrics(self) -> list[Compared]:
        """The latest value of each metric."""
        a, b = (record.metrics for record in self.records)
        return [Compared(name, [show_figure(of[name]) if name in of else "" for of in (a, b)]) for name in {**a, **b}]


def device(record: RunRecord) -> str:
    """Returns the device of a run: the cards that it trained on, however many the machine has."""
    gpus = used_cards(Evidence(record))
    on = record.plan.get("trainer.accelerator", {"value": None})["value"]
    return ", ".join(str(gpu.get("name")) for gpu in gpus) if gpus and on != "cpu" else record.machine.get("cpu", "")


def _machine(record: RunRecord) -> dict[str, Any]:
    known = {name: value for name, value in record.machine.items() if name not in ("gpus", "versions")}
    versions = {f"version of {name}": version for name, version in record.machine.get("versions", {}).items()}
    gpus = "; ".join(str(gpu.get("name")) for gpu in used_cards(Evidence(record)))
    code: dict[str, Any] = {}
    if git := record.git:
        change = f"{git['digest'][:8]} {', '.join(git['changed'])}".strip()
        code = {"commit": git["commit"][:12], "uncommitted change": change or None}
    return {"gpus": gpus or None, "host": record.host_name, **known, **versions, **code}


def _shown(found: Sequence[tuple[str, Any, Any]]) -> list[Compared]:
    return [Compared(name, [show_value(a), show_value(b)]) for name, a, b in found]
