"""Builds the sections of a report, of lines and tables, for ``report.html``, ``report.md`` and ``wellfed diagnose``."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellfed.explain.diagnosis.rules.compute_rules import how_often
from wellfed.explain.diagnosis.rules.verdict_rules import beside_steps
from wellfed.explain.report.figures import PARTS, PHASES, Figure, figures_of, level, sample_unit
from wellfed.record.entries import FindingEntry, RunRecord
from wellfed.record.provenance import engine_version
from wellfed.units import counted, show_count, show_duration, show_energy, show_gib, show_ms, show_percent

EVERYDAY_EVENTS = ("checkpoint", "resume", "metric_absent", "ceiling_doubtful")
"""Kinds of events that need no warning, or stand beside the figures."""
_MOSTLY_STEPS, _MOST_PARTS = 0.95, 6
"""Share of the wall time in steps from which its parts are not listed, and most parts listed."""
MOST_GPUS = 16
"""Most GPUs in lines and pictures; run.json has all."""
_LONGEST_NAME = 100
"""Characters shown of the name of an operation; a kernel's may have hundreds."""
OF_EVERY_RUN = frozenset({"report", "page", "steps", "metrics", "telemetry", "log", "last", "best", "profile"})
"""Names of the artifacts that every run writes; a workload's evaluation wrote the others."""
Row = tuple[str, ...]


@dataclass(frozen=True)
class ReportSection:
    """Section of a report: lines, a table, or both."""

    name: str
    title: str
    lines: Sequence[str] = ()
    """Sentences or short phrases, one a line."""
    head: Row = ()
    """Head of the table; empty without a table."""
    rows: Sequence[Row] = ()


def sections(record: RunRecord, first: Mapping[str, float] | None = None) -> list[ReportSection]:
    """Returns all sections of a run, in the order in which a reader asks. ``first``: first value of each metric."""
    figures = figures_of(record)
    begun = {name: show_figure(value) for name, value in (first or {}).items()}
    metrics = [(name, begun.get(name, ""), show_figure(value)) for name, value in record.metrics.items()]
    tested = [] if record.tested is None else [f"test/ is of {record.tested}"]
    plan = [(knob, show_value(one["value"]), one["source"], one["because"]) for knob, one in record.plan.items()]
    findings = [f"{finding['id']} ({finding['severity']}): {finding['text']}" for finding in record.findings]
    files = [f"{name}: {path}" for name, path in own_files(record).items()]
    found = [
        ReportSection("verdict", "Verdict", verdict_lines(record, figures)),
        ReportSection("findings", "What to change", findings),
        ReportSection("utilisation", "Utilisation", utilisation_lines(record, figures)),
        ReportSection("time", "Where the time went", time_lines(record, figures)),
        ReportSection("memory", "Memory", memory_lines(record, figures)),
        ReportSection("metrics", "Metrics", tested, ("metric", "first", "latest"), metrics),
        ReportSection("files", "What the evaluation left", files),
        ReportSection("plan", "Plan", (), ("knob", "value", "source", "because"), plan),
        _profile_section(record),
        ReportSection("machine", "Machine", machine_lines(record)),
        _events_section(record.events),
        ReportSection("started", "Started with", started_lines(record)),
    ]
    return [section for section in found if section.name not in ("files", "profile") or section.lines]


def headline(record: RunRecord) -> str:
    """Returns how the run ended, after how many steps and what time."""
    ended_by = f", ended by {record.ended_by}" if record.ended_by else ""
    return f"{record.status}: {counted(record.steps, 'step')} in {show_duration(record.duration_s)}{ended_by}"


def state_lines(record: RunRecord) -> list[str]:
    """Returns a line if the run is going on, or was killed."""
    if record.status == "running":
        return [f"It still runs (process {record.pid} on {record.host_name}): the figures are those until now."]
    if record.status == "killed":
        return ["Its process is gone and recorded no reason: the figures are those until then."]
    return []


def simulated_line(record: RunRecord) -> str:
    """Returns a sentence if the GPU is simulated, else nothing."""
    names = dict.fromkeys(gpu.get("name", "") for gpu in record.machine.get("gpus", ()) if gpu.get("is_simulated"))
    line = f"Simulated: {', '.join(names)}. The figures show how wellfed works, not how fast a GPU is."
    return line if names else ""


def error_lines(record: RunRecord) -> list[str]:
    """Returns the error that ended a run, and the way out."""
    error = record.error
    if error:
        kind = "" if error["kind"] == "code" else f"{error['kind']}: "  # any error that is none of the other kinds
        return [kind + " ".join(error["message"].split()), error["advice"]]
    stops = [event for event in record.events if event["kind"] == "signal"]
    if record.status != "interrupted" or not stops:
        return []
    return [str(stops[-1][name]) for name in ("message", "advice") if name in stops[-1]]


def verdict_lines(record: RunRecord, figures: Mapping[str, Figure]) -> list[str]:
    """Returns how the run ended, its error, and how much it trained at which rate."""
    epochs = "" if record.epochs is None else f"{show_count(record.epochs)} epochs, "
    lines = [headline(record), *error_lines(record), *state_lines(record)]
    lines += [line] if (line := simulated_line(record)) else []
    lines.append(f"{epochs}{show_count(record.samples)} {sample_unit(record)}")
    if record.throughput:
        steps, warmup = record.throughput["steps"], record.throughput["warmup_steps"]
        lines.append(f"{figures['rate'].line} over {counted(steps, 'step')} after {warmup} of warm-up")
    return [*lines, figures["of_ceiling"].line] if "of_ceiling" in figures else lines


def utilisation_lines(record: RunRecord, figures: Mapping[str, Figure]) -> list[str]:
    """Returns a line for each GPU, of many those that were idle most, and one on the processor."""
    names = {str(gpu.get("index", "")): gpu.get("name", "") for gpu in record.machine.get("gpus", ())}
    utils = {gpu: level(known, "util_pct") for gpu, known in record.gpus.items()}
    gpus = [] if record.is_on_cpu else sorted(utils, key=lambda gpu: util["mean"] if (util := utils[gpu]) else math.inf)
    lines = [figures[key].line for key in ("gpu", "cpu") if key in figures]
    if len(gpus) > MOST_GPUS:
        lines.append(f"run.json has all {len(gpus):,} GPUs; here are the {MOST_GPUS} idlest")
    shown = [gpu for gpu in record.gpus if gpu in gpus[:MOST_GPUS]]
    lines += [
        f"GPU {gpu} {names.get(gpu, '')}".rstrip() + f": {told}" for gpu in shown if (told := _of_gpu(record, gpu))
    ]
    if swing := record.swing:
        cause = f", as often as {swing['cause']}" if swing["cause"] else ""
        lines.append(f"utilisation swings with a period of {swing['period_s']:.3g} s{cause}")
    return lines or ["Neither a GPU nor the host was watched."]


_OF_GPU = {
    "util_pct": "utilisation {mean:.0f} %",
    "sm_active_pct": "SMs {mean:.0f} %",
    "tensor_active_pct": "tensor cores {mean:.0f} %",
    "dram_active_pct": "DRAM {mean:.0f} %",
    "mem_used_gib": "memory {mean:.1f} GiB (at most {max:.1f})",
    "power_w": "{mean:.0f} W",
}
"""Column of telemetry.csv -> words for a GPU's figure."""


def _of_gpu(record: RunRecord, gpu: str) -> str:
    figures = record.gpus[gpu]
    levels = {name: level(figures, name, *(["max"] if "{max" in words else [])) for name, words in _OF_GPU.items()}
    parts = [words.format(**found) for name, words in _OF_GPU.items() if (found := levels[name])]
    joules = {of: figures.get(key) for key, of in (("energy_j", ""), ("energy_per_sample_j", " a sample"))}
    return ", ".join(
        [*parts, *(f"{show_energy(one)}{of}" for of, one in joules.items() if isinstance(one, int | float))]
    )


def time_lines(record: RunRecord, figures: Mapping[str, Figure]) -> list[str]:
    """Returns readiness, step, ranks and wall time, one line each, if they were measured."""
    lines = [figures["ready"].line] if "ready" in figures else []
    if "step" in figures:
        lines.append(figures["step"].line)
        for names in (PARTS, PHASES):
            parts = [f"{name} {figures[name].shown}" for name in names if name in figures]
            lines += [", ".join(parts)] if parts else []
    if len(record.ranks) > 1:
        least, *_, most = sorted(record.ranks, key=lambda one: one["wait_frac"])
        waits = [f"{show_percent(one['wait_frac'])} (rank {one['rank']})" for one in (least, most)]
        lines.append(f"{len(record.ranks)} ranks wait for data between {' and '.join(waits)} of their steps' time")
    none = "No step was timed: all were warm-up." if record.steps else "No step was timed."
    return [*(lines or [none]), *wall_lines(record)]


def wall_lines(record: RunRecord) -> list[str]:
    """Returns the kinds of wall time, the largest first, if a good share of it was no step."""
    wall = record.wall
    if wall is None or wall["total_s"] <= 0 or wall["steps_s"] >= _MOSTLY_STEPS * wall["total_s"]:
        return []
    parts = beside_steps(wall, wall["callbacks"], _MOST_PARTS)
    steps = f"steps {show_percent(wall['steps_s'] / wall['total_s'])}"
    return [f"the {show_duration(wall['total_s'])} of training: {', '.join([steps, *parts])}"]


def memory_lines(record: RunRecord, figures: Mapping[str, Figure]) -> list[str]:
    """Returns peak memory beside the budget, and the prediction."""
    if "memory" not in figures:
        return ["Nothing was measured."]
    predicted = record.memory.get("predicted_peak_gib")
    of_card = " for a card" if record.is_on_cpu else ""
    foretold = [] if predicted is None else [f"predicted{of_card}: {show_gib(predicted)}"]
    return [f"{record.memory['device']}, {figures['memory'].line}", *foretold]


def machine_lines(record: RunRecord) -> list[str]:
    """Returns processor, GPUs and versions, and why a GPU is unusable."""
    machine = record.machine
    if not machine:
        return ["Not recorded."]
    sizes = {"{:.3g} cores": machine.get("cpu_quota_cores"), "{:.1f} GiB memory": machine.get("ram_gib")}
    of_host = [shown.format(size) for shown, size in sizes.items() if size is not None]
    lines = [", ".join(filter(None, [machine.get("cpu"), *of_host, machine.get("os")]))]
    sized = [(gpu.get("name", ""), gpu.get("memory_gib")) for gpu in machine.get("gpus", ())]
    kinds = Counter(name if size is None else f"{name}, {size:.1f} GiB" for name, size in sized)
    lines += [f"{counted(number, 'GPU')}: {kind}" for kind, number in kinds.items()]
    problems = {"NVML": machine.get("nvml_problem"), "torch": machine.get("torch_problem")}
    lines += [f"{name}: {problem}" for name, problem in problems.items() if problem]
    lines.append(", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items()))
    return [line for line in lines if line]


def _events_section(events: Sequence[Mapping[str, Any]]) -> ReportSection:
    """Returns a row for each kind of event: its steps, and the facts of the last one."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(event)
    rows = []
    for kind, alike in by_kind.items():
        steps = dict.fromkeys(str(event["step"]) for event in (alike[0], alike[-1]))
        often = f", {len(alike)} times" if len(alike) > 1 else ""
        facts = (f"{name}={value}" for name, value in alike[-1].items() if name not in ("kind", "step"))
        rows.append((" to ".join(steps), f"{kind}{often}", ", ".join(facts)))
    return ReportSection("events", "Events", (), ("step", "event", "facts, of several the last"), rows)


def _profile_section(record: RunRecord) -> ReportSection:
    """Returns the operations of the profiled steps, and where the host waits for the GPU."""
    profile = record.profile
    if profile is None:
        return ReportSection("profile", "Profile of steps")
    steps = counted(profile["steps"], "step")
    lines = [f"{steps} recorded, {profile['step_ms']:.2f} ms each: recording costs time, too"]
    busy, copy_ms = profile["device_busy_frac"], profile["copy_ms_per_step"]
    if busy is not None and copy_ms is not None:
        lines.append(f"the GPU ran kernels {show_percent(busy)} of the time; copies take {show_ms(copy_ms)} a step")
    lines += [
        f"{one['place']} makes the host wait for the GPU, {how_often(one['per_step'])}"
        for one in record.synchronisations or []
    ]
    lines.append("each of their operations: profile/trace.json of the run folder, for https://ui.perfetto.dev")
    head = (f"{'GPU' if profile['by'] == 'device' else 'CPU'} ms a step", "share", "calls a step", "operation")
    rows: list[Row] = [
        (
            f"{one['ms_per_step']:.3f}",
            show_percent(one["share_frac"]),
            f"{one['calls'] / max(1, profile['steps']):.4g}",
            one["name"][:_LONGEST_NAME],
        )
        for one in profile["operations"]
    ]
    return ReportSection("profile", "Profile of steps", lines, head, rows)


def started_lines(record: RunRecord) -> list[str]:
    """Returns the command that repeats the run, and the code that it ran."""
    lines = [
        f"overrides: {shlex.join(record.overrides) or 'none'}",
        f"seed {record.seed}",
        f"began {record.started_at}",
    ]
    if record.git:
        lines.append(f"commit {record.git['commit']}{', with uncommitted changes' if record.git['dirty'] else ''}")
    if record.engine and not record.engine["within_project"]:
        lines.append(engine_version(record.engine))
    if record.resumed_from:
        lines.append(f"resumed from {record.resumed_from}")
    return lines


def own_files(record: RunRecord) -> dict[str, str]:
    """Returns the files of the workload's evaluation by name, relative to the run folder."""
    return {name: path for name, path in record.artifacts.items() if name not in OF_EVERY_RUN}


def wandb_upload(record: RunRecord) -> list[str]:
    """Returns the words of the command that uploads an offline run to wandb, quoted for a shell; else none."""
    wandb = record.wandb
    if wandb is None or wandb["mode"] != "offline":
        return []
    return ["wandb", "sync", *map(shlex.quote, wandb["parts"])]


def show_value(value: Any) -> str:
    """Returns a value as typed on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show_figure(value: float | None, digits: int = 5) -> str:
    """Returns a metric as text."""
    return f"{value:.{digits}g}" if value is not None and math.isfinite(value) else "not finite"


def gain_of(finding: FindingEntry) -> str:
    """Returns the gain of a finding, for after its overrides; empty without one."""
    gain = finding["gain"]["text"] if finding["gain"] and finding["change"] else ""
    return f"{gain[:1].upper()}{gain[1:]}." if gain else ""
