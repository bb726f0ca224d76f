"""Writes report.html of a run from its template, ``run_page.html.j2``: figures here, words and marks there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.report.pictures.run_pictures import pictures
from wellfed.explain.report.run_lines import error_lines, figure_of, growth, simulated_lines
from wellfed.explain.report.run_sections import sections
from wellfed.record import FindingEntry, RunRecord
from wellfed.units import show_count, show_gib, show_ms, show_percent


@dataclass(frozen=True)
class Tile:
    """A figure to be read at a glance."""

    name: str
    figure: str
    unit: str = ""
    note: str = ""
    frac: float | None = None
    """Length of the bar, 0..1; None = no bar."""


def to_html(evidence: Evidence, folder: Path) -> str:
    """Returns the page of the run in ``folder``, with all texts escaped."""
    record = evidence.record
    return fill_in(
        Path(__file__).with_name("run_page.html.j2"),
        {
            "record": record,
            "sections": sections(record, evidence.first_metrics),
            "pictures": pictures(evidence, folder),
            "simulated": simulated_lines(record),
            "wrong": error_lines(record),
            "tiles": list(tiles(record)),
            "gain_of": gain_of,
        },
    )


def tiles(record: RunRecord) -> Iterator[Tile]:
    """Yields rate, share of the ceiling, utilisation, waiting and memory, if known."""
    throughput, ceiling, time, memory = record.throughput, record.ceiling, record.time, record.memory
    if throughput:
        low, high = throughput["ci95"] or (None, None)
        note = "" if low is None or high is None else f"95 %: {show_count(low)} to {show_count(high)}"
        yield Tile("rate", show_count(throughput["samples_per_s"]), f"{throughput['sample_unit']}/s", note)
        if ceiling and ceiling["samples_per_s"] > 0:
            frac = throughput["samples_per_s"] / ceiling["samples_per_s"]
            note = f"of {show_count(ceiling['samples_per_s'])} {throughput['sample_unit']}/s"
            yield Tile("of its ceiling", show_percent(frac), "", note, min(1.0, frac))
    utils = [figure_of(figures, "util_pct", "mean", "p5", "p95") for figures in record.gpus.values()]
    found = [one for one in utils if one]
    if found:
        mean_pct = fmean(one["mean"] for one in found)
        spread = f"p5 {min(one['p5'] for one in found):.0f}, p95 {max(one['p95'] for one in found):.0f}"
        of = f"{len(found)} GPUs, " if len(found) > 1 else ""
        yield Tile("GPU utilisation", f"{mean_pct:.0f} %", "", f"{of}{spread}", mean_pct / 100)
    elif record.host and record.machine.get("cpu_quota_cores"):
        busy, cores = record.host["cpu_pct"] / 100, record.machine["cpu_quota_cores"]
        yield Tile("CPU", f"{busy:.2f}", f"of {cores:.3g} cores", "busy while it trained", min(1.0, busy / cores))
    if time:
        waits, mean_ms = time["wait_frac"] + (time["copy_frac"] or 0.0), time.get("step_ms_mean")
        note = "of the mean step" + ("" if mean_ms is None else f", {show_ms(mean_ms)}")
        yield Tile("waiting for data", show_percent(waits), "", note, waits)
    if memory:
        peak, budget = memory["measured_peak_gib"], memory.get("budget_gib")
        note = "no budget" if budget is None else f"of a budget of {show_gib(budget)}"
        yield Tile("peak memory", show_gib(peak), growth(record), note, min(1.0, peak / budget) if budget else None)


def gain_of(finding: FindingEntry) -> str:
    """Returns the gain of a finding, for after its overrides."""
    _, _, rest = finding["text"].partition(f"Try: {' '.join(finding['change'])}")
    gain = rest.lstrip(", ").removeprefix(". ").strip(".")
    return f"{gain[:1].upper()}{gain[1:]}." if gain else ""
