"""The figures of a run with label, unit and digits. Screens, reports, comparisons and lists of runs take them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from rich.text import Text

from wellfed.explain.diagnosis.ceiling_check import contradiction, of_ceiling
from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_colour
from wellfed.explain.diagnosis.finding import waiting_colour
from wellfed.explain.diagnosis.step_times import OTHER, phase_shares
from wellfed.record.entries import RunRecord
from wellfed.units import counted, show_count, show_energy, show_gib, show_ms, show_percent

PARTS = ("wait", "copy", "compute", "host")
"""Kinds of a step's time."""
PHASES = ("forward", "backward", "optimizer", OTHER)
"""Phases of compute."""
_LEAST_FRAC = 0.01
"""Minimum share of a step for a ratio of a part of it."""


class Estimate(NamedTuple):
    """Figure with its 95 % interval, if it has one."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Figure:
    """A measured figure, ready to be shown."""

    label: str
    text: str
    """The figure with its unit."""
    note: str = ""
    """Its interval or its whole: ``(1,254-1,306)``, ``of 21.6 GiB``."""
    estimate: Estimate | None = None
    """Figure of which two runs have a ratio; None for shares of a whole."""
    frac: float | None = None
    """Share of a whole, 0..1, for a bar; None without one."""
    colour: str = ""
    """Colour on a terminal; empty for none."""

    @property
    def shown(self) -> str:
        """The text with its note."""
        return f"{self.text} {self.note}".rstrip()

    @property
    def line(self) -> str:
        """The label with text and note."""
        return f"{self.label}: {self.shown}"

    @property
    def cell(self) -> Text:
        """Label and text for a terminal."""
        return Text(f"{self.label} {self.text}", self.colour)


def figures_of(record: RunRecord) -> dict[str, Figure]:
    """Returns the figures of a run that were measured, by the keys of `FIGURES`, in this order."""
    return {key: figure for key, of in FIGURES.items() if (figure := of(record)) is not None}


def sample_unit(record: RunRecord) -> str:
    """Returns the name of a run's samples."""
    if record.throughput:
        return record.throughput["sample_unit"]
    workload = record.config.get("workload")
    return str(workload.get("sample_unit", "samples")) if isinstance(workload, Mapping) else "samples"


def utilisation(means_pct: Sequence[float], note: str = "") -> Figure:
    """Returns the utilisation of one GPU, or the range of several: ``GPU 3 %``, ``2 GPUs 60-90 %``."""
    low, high, mean = min(means_pct), max(means_pct), fmean(means_pct)
    is_one = len(means_pct) == 1
    label, text = ("GPU", f"{low:.0f} %") if is_one else (counted(len(means_pct), "GPU"), f"{low:.0f}-{high:.0f} %")
    return Figure(label, text, note, Estimate(mean), mean / 100, utilisation_colour(low))


def memory_of(label: str, used_gib: float, budget_gib: float | None) -> Figure:
    """Returns memory beside its budget."""
    if not budget_gib:
        return Figure(label, show_gib(used_gib), "", Estimate(used_gib))
    digits = 1 if used_gib >= 1 else 2
    text = f"{used_gib:.{digits}f} of {budget_gib:.1f} GiB"
    return Figure(label, text, "", Estimate(used_gib), min(1.0, used_gib / budget_gib))


def waiting(wait_frac: float, note: str = "", estimate: Estimate | None = None) -> Figure:
    """Returns the share of the steps' time that waits for data."""
    return Figure("wait", f"{100 * wait_frac:.0f} %", note, estimate, wait_frac, waiting_colour(wait_frac))


def level(figures: Mapping[str, Any], name: str, *parts: str) -> Mapping[str, float] | None:
    """Returns mean and levels of a GPU's figure; None if one of these is missing or no number."""
    found = figures.get(name)
    is_whole = isinstance(found, Mapping) and all(isinstance(found.get(part), int | float) for part in ("mean", *parts))
    return found if is_whole else None


def _rate(record: RunRecord) -> Figure | None:
    if not (throughput := record.throughput):
        return None
    rate, ends = throughput["samples_per_s"], throughput["ci95"]
    note = f"({show_count(ends[0])}-{show_count(ends[1])})" if ends and ends[0] > 0 else ""
    estimate = Estimate(rate, (ends[0], ends[1]) if ends else None)
    return Figure("rate", f"{show_count(rate)} {throughput['sample_unit']}/s", note, estimate)


def _of_ceiling(record: RunRecord) -> Figure | None:
    share, ceiling = of_ceiling(record), record.ceiling
    if share is None or ceiling is None:
        return None
    doubt = " (doubtful)" if contradiction(record) else ""
    kind = "possible" if share <= 1 else "without loading"  # of some 20 steps, so it may be lower
    note = f"of {show_count(ceiling['samples_per_s'])} {kind}{doubt}"
    return Figure("of the ceiling", show_percent(share), note, None, min(1.0, share))


def _ready(record: RunRecord) -> Figure | None:
    frac = record.readiness_frac
    return None if frac is None else Figure("batches ready", f"{100 * frac:.0f} %", "when asked for", None, frac)


def _step(record: RunRecord) -> Figure | None:
    if not (time := record.time):
        return None
    note = f"(median {show_ms(time['step_ms_p50'])}, p95 {show_ms(time['step_ms_p95'])})"
    return Figure("step", show_ms(time["step_ms_mean"]), note, Estimate(time["step_ms_mean"]))


def _part(name: str, record: RunRecord) -> Figure | None:
    """Returns the share of a part of the mean step, with its time."""
    time = record.time
    share = phase_shares(time).get(name) if name in PHASES else time and time.get(f"{name}_frac")
    if time is None or not isinstance(share, float | int):
        return None
    part_ms = share * time["step_ms_mean"]
    estimate = Estimate(part_ms) if share >= _LEAST_FRAC else None
    if name == "wait":
        return waiting(share, f"({show_ms(part_ms)})", estimate)
    return Figure(name, f"{100 * share:.0f} %", f"({show_ms(part_ms)})", estimate, share)


def _of_gpus(record: RunRecord, name: str) -> list[Mapping[str, float]]:
    gpus = [] if record.is_on_cpu else record.gpus.values()
    return [found for figures in gpus if (found := level(figures, name))]


def _gpu(record: RunRecord) -> Figure | None:
    if not (found := _of_gpus(record, "util_pct")):
        return None
    spread = [one for one in found if {"p5", "p95"} <= one.keys()]
    note = f"(p5 {min(one['p5'] for one in spread):.0f}, p95 {max(one['p95'] for one in spread):.0f})" if spread else ""
    return utilisation([one["mean"] for one in found], note)


def _power(record: RunRecord) -> Figure | None:
    power_w = sum(one["mean"] for one in _of_gpus(record, "power_w"))
    return Figure("power", f"{power_w:.0f} W", "", Estimate(power_w)) if power_w else None


def _energy(record: RunRecord) -> Figure | None:
    gpus = [] if record.is_on_cpu else [figures.get("energy_per_sample_j") for figures in record.gpus.values()]
    known = [joules for joules in gpus if isinstance(joules, float | int)]
    return Figure("energy a sample", show_energy(sum(known)), "", Estimate(sum(known))) if known else None


def _cpu(record: RunRecord) -> Figure | None:
    cores = record.machine.get("cpu_quota_cores")
    if "cpu_pct" not in record.host:
        return None
    busy = record.host["cpu_pct"] / 100
    of, frac = (f" of {cores:.3g}", min(1.0, busy / cores)) if cores else ("", None)
    return Figure("CPU", f"{busy:.1f}{of} cores", "", Estimate(busy), frac)


def _memory(record: RunRecord) -> Figure | None:
    if "measured_peak_gib" not in record.memory:
        return None
    label = "memory growth" if record.is_on_cpu else "memory"
    budget_gib = None if record.is_on_cpu else record.memory.get("budget_gib")
    return memory_of(label, record.memory["measured_peak_gib"], budget_gib)


FIGURES: Mapping[str, Callable[[RunRecord], Figure | None]] = {
    "rate": _rate,
    "of_ceiling": _of_ceiling,
    "ready": _ready,
    "step": _step,
    **{name: partial(_part, name) for name in (*PARTS[:3], *PHASES, *PARTS[3:])},
    "gpu": _gpu,
    "cpu": _cpu,
    "memory": _memory,
    "power": _power,
    "energy": _energy,
}
"""Key -> figure of a record; None if it was not measured."""
