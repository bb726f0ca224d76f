"""Compares two runs: which settings, plans, machines and figures differ, and which differences are only noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wellfed.explain.diagnosis.ceiling_check import of_ceiling
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.gains.device_load import used_cards
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import phase_shares
from wellfed.explain.report.run_lines import counted_steps, sample_unit, show_figure, show_value, simulated_lines
from wellfed.observe.telemetry.series import HOST
from wellfed.observe.timing.interval import half_width
from wellfed.observe.timing.step_clock import COMPUTE_PHASES
from wellfed.record.entries import RunRecord, differences
from wellfed.units import show_count, show_duration, show_energy, show_factor, show_gib, show_percent

_ROWS = ("wait", "copy", "compute", *COMPUTE_PHASES, "host")
"""Kinds of a step's time, with the phases of compute, in this order."""
_LEAST_FRAC = 0.01
"""Minimum share of a step for a ratio of a part of it."""


@dataclass(frozen=True)
class Estimate:
    """Figure with its 95 % interval, if it has one."""

    value: float
    interval: tuple[float, float] | None = None

    @classmethod
    def of_mean(cls, readings: Series) -> Estimate | None:
        """Returns the mean of a figure of each step, or of regular readings, which may be correlated."""
        if len(readings) == 0:
            return None
        values = readings.tolist()
        mean, half = math.fsum(values) / len(values), half_width(values, [1.0] * len(values))
        return cls(mean, None if half is None else (mean - half, mean + half))


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
    """Figure, setting or planned value of both runs."""

    name: str
    shown: Sequence[str]
    """Texts of A and B; empty: not measured."""
    ratio: Ratio | None = None
    reasons: Sequence[str] = ("", "")
    """Reasons for both values, of a plan."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes beside both texts: the reasons, or the ratio beside B's."""
        return self.reasons if self.ratio is None else ("", str(self.ratio))


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
    def is_of_one_unit(self) -> bool:
        """Whether both count the same samples, so that their rates have a ratio."""
        return len({(record.workload, sample_unit(record)) for record in self.records}) == 1

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
    def rate(self) -> Ratio | None:
        """Ratio of samples per second."""
        return Ratio.of(*map(_rate, self.records)) if self.is_of_one_unit else None

    @cached_property
    def caveats(self) -> list[str]:
        """Reasons against comparing figures of the two."""
        return [*_caveats(*self.records), *self.of_other_work]

    @cached_property
    def of_other_learning(self) -> list[str]:
        """Differences of workload and data, with which the two do other work."""
        a, b = self.records
        if a.workload != b.workload:
            return [f"Different workloads, {a.workload} and {b.workload}: rates and metrics are of different work."]
        if not self.is_of_one_unit:
            return [f"Samples are {sample_unit(a)} in A and {sample_unit(b)} in B: rates have no ratio."]
        names = [name for name, *_ in differences(a.config.get("workload"), b.config.get("workload"), "workload")]
        return (
            [f"What is learned differs ({', '.join(names)}): times and metrics are of different work."] if names else []
        )

    @cached_property
    def of_other_work(self) -> list[str]:
        """Differences of data and device, with which a ratio of the rates shows no effect of the settings."""
        a, b = map(device, self.records)
        on_others = (
            [f"Different devices, {a} and {b}: settings are not all that differs."] if a and b and a != b else []
        )
        return [*self.of_other_learning, *on_others]

    @cached_property
    def settings(self) -> list[Compared]:
        """Settings that differ, by dotted name, unless both plans made them the same."""
        a, b = self.records
        same = {knob for knob, one in a.plan.items() if knob in b.plan and one["value"] == b.plan[knob]["value"]}
        return _shown([one for one in differences(a.config, b.config) if one[0] not in same])

    @cached_property
    def plan(self) -> list[Compared]:
        """Knobs whose planned values differ, and why."""
        found, none = [], {"value": "not planned", "source": "", "because": ""}
        for knob in {**self.a.record.plan, **self.b.record.plan}:
            both: list[Mapping[str, Any]] = [record.plan.get(knob, none) for record in self.records]
            values = [show_value(one["value"]) for one in both]
            if values[0] != values[1]:
                found.append(Compared(knob, values, reasons=[f"{one['source']}: {one['because']}" for one in both]))
        return found

    @cached_property
    def machine(self) -> list[Compared]:
        """Hardware, versions and code."""
        a, b = map(_machine, self.records)
        return _shown(differences(a, b))

    @cached_property
    def figures(self) -> list[Compared]:
        """Measured figures of both."""
        return [one for one in _figures(self) if any(one.shown)]

    @cached_property
    def parts(self) -> tuple[Mapping[str, Estimate], Mapping[str, Estimate]]:
        """Mean time of each part of a step, in ms; parts that were not measured are left out."""
        return _parts_ms(self.a), _parts_ms(self.b)

    @cached_property
    def metrics(self) -> list[Compared]:
        """The latest value of each metric."""
        a, b = (record.metrics for record in self.records)
        return [Compared(name, [show_figure(of[name]) if name in of else "" for of in (a, b)]) for name in {**a, **b}]


def _parts_ms(evidence: Evidence) -> dict[str, Estimate]:
    """Returns the time of each part of a mean step."""
    clock = "device_" if evidence.on_gpu else ""
    columns = (
        (name, evidence.steps.column(f"{clock}{name}_ms" if name in COMPUTE_PHASES else f"{name}_ms")) for name in _ROWS
    )
    found = {name: Estimate.of_mean(column[np.isfinite(column)]) for name, column in columns}
    mean_ms = evidence.steps.mean_ms
    for name in COMPUTE_PHASES:  # timed in some steps alone, so the shares in the record decide
        of_timed, share = found.get(name), phase_shares(evidence.record.time).get(name)
        found[name] = None
        if of_timed is not None and of_timed.value > 0 and share is not None and mean_ms is not None:
            scale, of = share * mean_ms / of_timed.value, of_timed.interval
            found[name] = Estimate(share * mean_ms, None if of is None else (scale * of[0], scale * of[1]))
    return {name: estimate for name, estimate in found.items() if estimate is not None}


def device(record: RunRecord) -> str:
    """Returns the device of a run: the cards that it trained on, however many the machine has."""
    gpus = used_cards(Evidence(record))
    on = record.plan.get("trainer.accelerator", {"value": None})["value"]
    return ", ".join(str(gpu.get("name")) for gpu in gpus) if gpus and on != "cpu" else record.machine.get("cpu", "")


def _figures(both: Comparison) -> Iterator[Compared]:
    records = both.records
    has_ratio = both.is_of_one_unit
    yield Compared("status", [one.status for one in records])
    yield Compared("steps", [f"{one.steps:,}" for one in records])
    yield Compared("time, all in all", [show_duration(one.duration_s) for one in records])
    yield Compared("rate", [_shown_rate(one) for one in records], both.rate)
    tops = [None if one.ceiling is None else one.ceiling["samples_per_s"] for one in records]
    yield _measured("ceiling, samples/s", tops, show_count, has_ratio=has_ratio)
    yield _measured("of the ceiling", [of_ceiling(one) for one in records], show_percent)
    yield _measured("readiness", [one.readiness_frac for one in records], show_percent)
    for name, key in (("mean", "step_ms_mean"), ("median", "step_ms_p50"), ("p95", "step_ms_p95")):
        times: list[Mapping[str, Any]] = [one.time or {} for one in records]
        yield _measured(f"step, {name}", [one.get(key) for one in times], "{:.2f} ms".format)
    yield from _parts(both)
    yield from _watched(both)
    peaks = [one.memory.get("measured_peak_gib") for one in records]
    yield _measured("memory, peak", peaks, show_gib, has_ratio=True)
    yield _measured("memory, budget", [one.memory.get("budget_gib") for one in records], show_gib)
    of_gpus = [{} if one.is_on_cpu else one.gpus for one in records]
    for gpu in dict.fromkeys(gpu for gpus in of_gpus for gpu in gpus):
        energies = [gpus.get(gpu, {}).get("energy_per_sample_j") for gpus in of_gpus]
        yield _measured(f"GPU {gpu}: energy a sample", energies, show_energy, has_ratio=has_ratio)


def _measured(
    name: str, values: Sequence[float | None], show: Callable[[float], str], *, has_ratio: bool = False
) -> Compared:
    """Returns a figure that has no interval; one that was not measured is shown as empty."""
    shown = ["" if value is None else show(value) for value in values]
    return Compared(name, shown, _ratio(values) if has_ratio else None)


def _ratio(values: Sequence[float | None]) -> Ratio | None:
    return Ratio.of(*(None if value is None else Estimate(value) for value in values))


def _parts(both: Comparison) -> Iterator[Compared]:
    of_a, of_b = both.parts
    for name in _ROWS:
        shares: list[Any] = [one.time.get(f"{name}_frac") if one.time else None for one in both.records]
        if name in COMPUTE_PHASES and shares == [None, None]:
            continue
        shown = [
            ", ".join(([f"{part.value:.2f} ms"] if part else []) + ([] if share is None else [show_percent(share)]))
            for part, share in zip((of_a.get(name), of_b.get(name)), shares, strict=True)
        ]
        matters = max((share or 0.0 for share in shares), default=0.0) >= _LEAST_FRAC
        ratio = Ratio.of(of_a.get(name), of_b.get(name)) if matters and both.is_of_one_unit else None
        yield Compared(f"{name}, of the mean step", shown, ratio)


def _watched(both: Comparison) -> Iterator[Compared]:
    gpus = dict.fromkeys([*both.a.telemetry.gpus, *both.b.telemetry.gpus])
    for gpu, name in [(gpu, "util_pct") for gpu in gpus] or [(HOST, "cpu_pct")]:
        what = "CPU cores busy" if gpu == HOST else f"GPU {gpu}: utilisation"
        curves = [one.telemetry.curve(name, gpu) for one in (both.a, both.b)]
        means = [Estimate.of_mean(curve) for curve in curves]
        shown = [_busy(mean.value, one, gpu) if mean else "" for mean, one in zip(means, both.records, strict=True)]
        yield Compared(what, shown, Ratio.of(*means))


def _busy(busy_pct: float, record: RunRecord, gpu: int) -> str:
    """Returns the load of a GPU, or of the processor at 100 % a core."""
    if gpu != HOST:
        return f"{busy_pct:.0f} %"
    cores = record.machine.get("cpu_quota_cores")
    return f"{busy_pct / 100:.2f}" + ("" if cores is None else f" of {cores:.3g}")


def _caveats(a: RunRecord, b: RunRecord) -> Iterator[str]:
    for each, one in (("A", a), ("B", b)):
        if one.status != "ok":
            yield f"{each} has the status {one.status}: its figures are those until then."
    yield from dict.fromkeys([*simulated_lines(a), *simulated_lines(b)])
    if a.metrics and b.metrics and (a.steps, a.seed) != (b.steps, b.seed):
        yield f"Metrics are those after {counted_steps(a)} with seed {a.seed}, and {counted_steps(b)} with {b.seed}."


def _machine(record: RunRecord) -> dict[str, Any]:
    machine = record.machine
    git: Mapping[str, Any] = record.git or {}
    sizes = [(gpu.get("name"), gpu.get("memory_gib")) for gpu in used_cards(Evidence(record))]
    gpus = [" of ".join(filter(None, [name, "" if size is None else show_gib(size)])) for name, size in sizes]
    kept = {name: value for name, value in machine.items() if name not in ("gpus", "versions")}
    versions = {f"version of {name}": version for name, version in machine.get("versions", {}).items()}
    commit = f"{str(git.get('commit'))[:12]}{', changed' if git.get('dirty') else ''}" if git else None
    found = {"gpus": "; ".join(gpus) or None, "host": record.host_name, **kept, **versions, "commit": commit}
    if digest := git.get("digest"):
        found["uncommitted change"] = f"{digest[:8]}: {', '.join(git.get('changed', ()))}"
    return found


def _shown(found: Sequence[tuple[str, Any, Any]]) -> list[Compared]:
    return [Compared(name, [show_value(a), show_value(b)]) for name, a, b in found]


def _rate(record: RunRecord) -> Estimate | None:
    throughput = record.throughput
    if throughput is None:
        return None
    interval = throughput["ci95"]
    return Estimate(throughput["samples_per_s"], None if interval is None else (interval[0], interval[1]))


def _shown_rate(record: RunRecord) -> str:
    if (rate := _rate(record)) is None:
        return ""
    between = f" ({' to '.join(map(show_count, rate.interval))})" if rate.interval else ""
    return f"{show_count(rate.value)} {sample_unit(record)}/s{between}"
