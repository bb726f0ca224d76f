"""Writes report.html of a run from its template, ``run_page.html.j2``: figures here, words and marks there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from wellfed.explain.diagnosis.ceiling_check import contradiction, of_ceiling
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import LEARNING, tone_of, word_of
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.report.finding_pages import page_of_finding
from wellfed.explain.report.pictures.run_pictures import pictures
from wellfed.explain.report.run_lines import (
    error_lines,
    figure_of,
    gain_of,
    growth,
    own_files,
    sections,
    simulated_lines,
    state_lines,
)
from wellfed.record.entries import RunRecord
from wellfed.units import show_count, show_gib, show_ms, show_percent

_FILES = (
    *("run.json", "report.md", "steps.csv", "metrics.csv", "telemetry.csv", "train.log", "checkpoints", "profile"),
    "tensorboard",
)
"""Files of every run that the page links to, with those of the evaluation."""
_PLANNED = (
    *("memory.micro_batch", "loader.backend", "loader.num_workers", "loader.prefetch_factor", "gpu.precision"),
    *("gpu.memory_gib", "gpu.compile", "trainer.devices", "workload.effective_batch_size"),
)
"""Knobs of the plan that the page shows unfolded, beside those that were set by hand or measured."""


@dataclass(frozen=True)
class Box:
    """Box at the top of a page, for what must be seen first."""

    tone: str
    """Name of its colour."""
    word: str
    text: str
    command: str = ""
    note: str = ""
    is_small: bool = False
    finding: str = ""


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
    """Returns the page of the run in ``folder``, texts escaped."""
    record = evidence.record
    found = {section.name: section for section in sections(record, evidence.first_metrics)}
    names = [*_FILES, *own_files(record).values()]
    above = {*error_lines(record), *simulated_lines(record), *state_lines(record)}
    return fill_in(
        Path(__file__).with_name("run_page.html.j2"),
        {
            "record": record,
            "sections": found,
            "pictures": pictures(evidence, folder),
            "boxes": list(boxes(record)),
            "tiles": list(tiles(record)),
            "state": state_lines(record),
            "rest": [line for line in found["verdict"].lines[1:] if line not in above],
            "gain_of": gain_of,
            "page_of": partial(page_of_finding, folder=folder),
            "tone_of": tone_of,
            "files": [(name, quote(name)) for name in names if os.path.exists(folder / name)],
            "first_rows": [row for row in found["plan"].rows if row[0] in _PLANNED or row[2] in ("set", "measured")],
        },
    )


def boxes(record: RunRecord) -> Iterator[Box]:
    """Yields the error that ended the run, the verdict, and what was lost."""
    if error := error_lines(record):
        word = "Out of memory" if record.status == "oom" else record.status.capitalize()
        yield Box("bad", word, error[0], note=" ".join(error[1:]))
    if record.findings:
        first = record.findings[0]
        change = " ".join(first["change"])
        yield Box(
            tone_of(first),
            word_of(first),
            f"{first['message']} {first['advice']}",
            change,
            " ".join(filter(None, [gain_of(first), LEARNING * first["changes_learning"]])),
            finding=first["id"],
        )
    else:
        yield Box("two", "No verdict", "What the run recorded does not show where its time went.")
    kinds = {"gpu_lost": "GPU lost", "disk_full": "Disk full"}
    lost = {event["kind"]: event for event in record.events if event["kind"] in kinds}
    for kind, event in lost.items():
        facts = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("kind", "time_s"))
        yield Box("bad", kinds[kind], facts, is_small=True)
    for line in simulated_lines(record):
        yield Box("four", "Simulated GPU", line.removeprefix("Simulated: "), is_small=True)


def tiles(record: RunRecord) -> Iterator[Tile]:
    """Yields rate, share of the ceiling, utilisation, waiting and memory, if known."""
    throughput, ceiling, time, memory = record.throughput, record.ceiling, record.time, record.memory
    if throughput:
        interval = throughput["ci95"]
        note = f"95 %: {' to '.join(map(show_count, interval))}" if interval and interval[0] > 0 else ""
        yield Tile("rate", show_count(throughput["samples_per_s"]), f"{throughput['sample_unit']}/s", note)
        if ceiling and (frac := of_ceiling(record)) is not None:
            note = f"of {show_count(ceiling['samples_per_s'])} {throughput['sample_unit']}/s"
            note += ", doubtful" if contradiction(record) else ""
            yield Tile("of its ceiling", show_percent(frac), "", note, min(1.0, frac))
    gpus = [] if record.is_on_cpu else record.gpus.values()
    found = [one for gpu in gpus if (one := figure_of(gpu, "util_pct", "mean", "p5", "p95"))]
    if found:
        mean_pct = fmean(one["mean"] for one in found)
        spread = f"p5 {min(one['p5'] for one in found):.0f}, p95 {max(one['p95'] for one in found):.0f}"
        of = f"{len(found)} GPUs, " if len(found) > 1 else ""
        yield Tile("GPU utilisation", f"{mean_pct:.0f} %", "", f"{of}{spread}", mean_pct / 100)
    elif record.host and record.machine.get("cpu_quota_cores"):
        busy, cores = record.host["cpu_pct"] / 100, record.machine["cpu_quota_cores"]
        yield Tile("CPU", f"{busy:.2f}", f"of {cores:.3g} cores", "busy while it trained", min(1.0, busy / cores))
    if time:
        waits, name = time["wait_frac"], "waiting for data"
        if time["copy_frac"] is not None:
            waits, name = waits + time["copy_frac"], "waiting and copying"
        yield Tile(name, show_percent(waits), "", f"of the mean step, {show_ms(time['step_ms_mean'])}", waits)
    if memory:
        peak, budget = memory["measured_peak_gib"], memory.get("budget_gib")
        note = "no budget" if budget is None else f"of a budget of {show_gib(budget)}"
        note = ", ".join(filter(None, [growth(record).strip(), note]))
        yield Tile("peak memory", show_gib(peak), "", note, min(1.0, peak / budget) if budget else None)
