"""Words the figures of a run as lines, and builds the sections of report.html, report.md and ``wellfed diagnose``."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from wellfed.explain.diagnosis.ceiling_check import ceiling_line
from wellfed.explain.diagnosis.rules.compute_rules import how_often
from wellfed.explain.diagnosis.rules.verdict_rules import beside_steps
from wellfed.explain.diagnosis.step_times import show_phases
from wellfed.record.entries import FindingEntry, RunRecord, SwingEntry
from wellfed.record.provenance import engine_version
from wellfed.units import counted, show_count, show_duration, show_energy, show_gib, show_ms, show_percent

EVERYDAY_EVENTS = ("checkpoint", "resume", "metric_absent", "ceiling_doubtful")
"""Kinds of events that need no warning, or stand beside the figures."""
_MOSTLY_STEPS, _MOST_PARTS = 0.95, 6
"""Share of the wall time in steps from which its parts are not listed, and most parts listed."""
MOST_ALIKE = 3
"""Events of a kind that the report shows one by one; run.json has them all."""
MOST_GPUS = 16
"""Most GPUs in lines and pictures; run.json has all."""
_BUSY = {"sm_active_pct": "SMs", "tensor_active_pct": "tensor cores", "dram_active_pct": "DRAM"}


def headline(record: RunRecord) -> str:
    """Returns how the run ended, after how many steps and what time."""
    ended_by = f", ended by {record.ended_by}" if record.ended_by else ""
    return f"{record.status}: {counted_steps(record)} in {show_duration(record.duration_s)}{ended_by}"


def state_lines(record: RunRecord) -> list[str]:
    """Returns a line if the run is going on or did not end well."""
    if record.status == "running":
        return [f"It still runs (process {record.pid} on {record.host_name}): the figures are those until now."]
    if record.status == "killed":
        return ["Its process is gone and recorded no reason: the figures are those until then."]
    return []


def amount_line(record: RunRecord) -> str:
    """Returns epochs, if they are known, and samples of a run."""
    epochs = "" if record.epochs is None else f"{show_count(record.epochs)} epochs, "
    return f"{epochs}{show_count(record.samples)} {sample_unit(record)}"


def sample_unit(record: RunRecord) -> str:
    """Returns the name of a run's samples."""
    if record.throughput:
        return record.throughput["sample_unit"]
    workload = record.config.get("workload")
    return str(workload.get("sample_unit", "samples")) if isinstance(workload, Mapping) else "samples"


def counted_steps(record: RunRecord) -> str:
    """Returns the number of steps: ``1 step``, ``1200 steps``."""
    return f"{record.steps} step{'s' * (record.steps != 1)}"


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


def simulated_lines(record: RunRecord) -> list[str]:
    """Returns a line if the GPU is simulated."""
    names = dict.fromkeys(gpu.get("name", "") for gpu in record.machine.get("gpus", ()) if gpu.get("is_simulated"))
    line = f"Simulated: {', '.join(names)}. The figures show how wellfed works, not how fast a GPU is."
    return [line] if names else []


def speed_lines(record: RunRecord) -> list[str]:
    """Returns throughput and ceiling, one line each, if they were measured."""
    throughput = record.throughput
    lines = []
    if throughput:
        line = f"{show_count(throughput['samples_per_s'])} {throughput['sample_unit']}/s"
        if throughput["ci95"] and throughput["ci95"][0] > 0:
            low, high = throughput["ci95"]
            line += f" (95 % interval {show_count(low)} to {show_count(high)})"
        of = "1 step" if throughput["steps"] == 1 else f"{throughput['steps']} steps"
        lines.append(f"{line} over {of} after {throughput['warmup_steps']} of warm-up")
    ceiling = ceiling_line(record)
    return lines if ceiling is None else [*lines, ceiling]


def time_lines(record: RunRecord) -> list[str]:
    """Returns readiness, shares of a step, swing and phases, one line each, if they were measured."""
    time, readiness_frac = record.time, record.readiness_frac
    lines = []
    if readiness_frac is not None:
        line = f"readiness {show_percent(readiness_frac)}: steps whose batch was waiting when asked for"
        # A device with queued work is not held up while the host waits.
        if readiness_frac < 0.9 and time and time["copy_frac"] is not None and time["wait_frac"] < 0.05:
            line += "; the device had work meanwhile"
        lines.append(line)
    if time:
        shares = {name: time[f"{name}_frac"] for name in ("wait", "copy", "compute", "host")}  # type: ignore[literal-required]
        phases = f" ({split})" if (split := show_phases(time)) else ""
        shown = ", ".join(
            f"{name} {show_percent(share)}{phases if name == 'compute' else ''}"
            for name, share in shares.items()
            if share is not None
        )
        levels = f"median {time['step_ms_p50']:.2f}, p95 {time['step_ms_p95']:.2f}"
        lines.append(f"a step takes {time['step_ms_mean']:.2f} ms on average ({levels}): {shown}")
    lines += rank_lines(record)
    none = "No step was timed: all were warm-up." if record.steps else "No step was timed."
    return [*(lines or [none]), *phase_lines(record), *wall_lines(record)]


def rank_lines(record: RunRecord) -> list[str]:
    """Returns a line on how long each of several ranks waited for data."""
    if len(record.ranks) < 2:
        return []
    least, *_, most = sorted(record.ranks, key=lambda one: one["wait_frac"])
    waits = [f"{show_percent(one['wait_frac'])} (rank {one['rank']})" for one in (least, most)]
    return [f"{len(record.ranks)} ranks wait for data between {' and '.join(waits)} of their steps' time"]


def wall_lines(record: RunRecord) -> list[str]:
    """Returns the kinds of wall time, the largest first, if a good share of it was no step."""
    wall = record.wall
    if wall is None or wall["total_s"] <= 0 or wall["steps_s"] >= _MOSTLY_STEPS * wall["total_s"]:
        return []
    parts = beside_steps(wall, wall["callbacks"], _MOST_PARTS)
    steps = f"steps {show_percent(wall['steps_s'] / wall['total_s'])}"
    return [f"the {show_duration(wall['total_s'])} of training: {', '.join([steps, *parts])}"]


def phase_lines(record: RunRecord) -> list[str]:
    """Returns the seconds of each phase."""
    start = record.before_training
    parts = [f"{name.removesuffix('_s')} {show_duration(took_s)}" for name, took_s in start.items()]  # type: ignore[arg-type]
    for phase, spent in record.phases.items():
        if phase != "start" and spent["times"]:
            often = f" ({spent['times']} times)" if spent["times"] > 1 and phase != "train" else ""
            parts.append(f"{phase} {show_duration(spent['total_s'])}{often}")
    return [f"phases: {', '.join(parts)}"] if parts else []


def swing_line(swing: SwingEntry) -> str:
    """Returns a line on a swing of the utilisation: its period, and what comes as often."""
    cause = f", as often as {swing['cause']}" if swing["cause"] else ""
    return f"utilisation swings with a period of {swing['period_s']:.3g} s{cause}"


def gpu_lines(record: RunRecord) -> list[str]:
    """Returns a line for each GPU with NVML's figures of training; of many GPUs only the idlest."""
    names = {str(gpu.get("index", "")): gpu.get("name", "") for gpu in record.machine.get("gpus", ())}
    shown, lines = list(record.gpus), list[str]()
    if len(shown) > MOST_GPUS:
        utils = {gpu: figure_of(figures, "util_pct", "mean") for gpu, figures in record.gpus.items()}
        idlest = sorted(shown, key=lambda gpu: util["mean"] if (util := utils[gpu]) else math.inf)[:MOST_GPUS]
        shown = [gpu for gpu in shown if gpu in idlest]
        known = [util["mean"] for util in utils.values() if util]
        all_of_them = f"utilisation {fmean(known):.0f} % on average; " if known else ""
        lines.append(f"{len(utils):,} GPUs: {all_of_them}run.json has each, and here are the {MOST_GPUS} idlest")
    for index in shown:
        figures = record.gpus[index]
        parts = []
        if util := figure_of(figures, "util_pct", "mean", "p5", "p95"):
            parts.append(f"utilisation {util['mean']:.0f} % (p5 {util['p5']:.0f}, p95 {util['p95']:.0f})")
        busy = {name: figure_of(figures, key, "mean") for key, name in _BUSY.items()}
        parts += [f"{name} {one['mean']:.0f} %" for name, one in busy.items() if one]
        if memory := figure_of(figures, "mem_used_gib", "mean", "max"):
            parts.append(f"memory {memory['mean']:.1f} GiB (at most {memory['max']:.1f})")
        if power := figure_of(figures, "power_w", "mean"):
            parts.append(f"{power['mean']:.0f} W")
        for key, of in (("energy_j", ""), ("energy_per_sample_j", " a sample")):
            if isinstance(figures.get(key), (int, float)):
                parts.append(f"{show_energy(figures[key])}{of}")
        if parts:
            lines.append(f"gpu {index} {names.get(index, '')}".rstrip() + f": {', '.join(parts)}")
    return lines


def figure_of(figures: Mapping[str, Any], name: str, *parts: str) -> Mapping[str, float] | None:
    """Returns a figure of a GPU; None if one of these parts is missing or no number."""
    found = figures.get(name)
    is_whole = isinstance(found, Mapping) and all(isinstance(found.get(part), (int, float)) for part in parts)
    return found if is_whole else None


def host_lines(record: RunRecord) -> list[str]:
    """Returns CPU and memory of the process while it trained."""
    host, cores = record.host, record.machine.get("cpu_quota_cores")
    if not host:
        return ["Neither a GPU nor the host was watched."]
    of = "" if cores is None else f" of {cores:.3g}"
    return [f"CPU: {host['cpu_pct'] / 100:.2f}{of} cores busy, {host['rss_gib']:.2f} GiB resident"]


def _kind_of(gpu: Mapping[str, Any]) -> str:
    size = "" if gpu.get("memory_gib") is None else f", {gpu['memory_gib']:.1f} GiB"
    kind = "" if gpu.get("capability") is None else f", compute capability {gpu['capability']}"
    return f"{gpu.get('name', '')}{size}{kind}{', a MIG instance' if gpu.get('is_mig') else ''}"


def machine_lines(record: RunRecord) -> list[str]:
    """Returns processor, GPUs and versions, and why a GPU is unusable."""
    machine = record.machine
    if not machine:
        return ["Not recorded."]
    sizes = {"{:.3g} cores": machine.get("cpu_quota_cores"), "{:.1f} GiB memory": machine.get("ram_gib")}
    of_host = [shown.format(size) for shown, size in sizes.items() if size is not None]
    lines = [", ".join(filter(None, [machine.get("cpu"), *of_host, machine.get("os")]))]
    kinds = Counter(map(_kind_of, machine.get("gpus", ())))
    lines += [f"{counted(number, 'GPU')}: {kind}" for kind, number in kinds.items()]
    problems = {"NVML": machine.get("nvml_problem"), "torch": machine.get("torch_problem")}
    lines += [f"{name}: {problem}" for name, problem in problems.items() if problem]
    lines.append(", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items()))
    if record.telemetry:
        took = f"{show_percent(record.telemetry['cpu_frac'])} of a core"
        lines.append(f"watching it every {record.telemetry['interval_s']:g} s took {took}")
    return [line for line in lines if line]


def event_rows(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns step, kind and facts; many events of a kind are one row, with the facts of the last."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(event)
    rows = []
    for event in events:
        kind, alike = event["kind"], by_kind[event["kind"]]
        if len(alike) <= MOST_ALIKE:
            rows.append((str(event["step"]), kind, _facts(event)))
        elif event is alike[0]:
            steps = f"{event['step']} to {alike[-1]['step']}"
            rows.append((steps, f"{kind}, {len(alike)} times", f"the last: {_facts(alike[-1])}"))
    return rows


def events_line(record: RunRecord) -> str:
    """Returns the number of events by kind; empty without events."""
    kinds = Counter(event["kind"] for event in record.events)
    shown = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    return f"{counted(len(record.events), 'event')}: {shown}" if kinds else ""


def _facts(event: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in event.items() if name not in ("kind", "step"))


def memory_lines(record: RunRecord) -> list[str]:
    """Returns peak memory beside the budget and the prediction."""
    memory = record.memory
    if not memory:
        return ["Nothing was measured."]
    budget_gib, predicted = memory.get("budget_gib"), memory.get("predicted_peak_gib")
    foretold = "" if predicted is None else f" ({show_gib(predicted)} predicted for a card)"
    budget = "no budget" if budget_gib is None else f"budget {budget_gib:.1f} GiB"
    peak = f"peak {show_gib(memory['measured_peak_gib'])}{growth(record)}"
    return [f"{memory['device']}: {peak}{foretold}, {budget}"]


def growth(record: RunRecord) -> str:
    """Returns a note that a peak is the growth of the process, if it is not a device's."""
    return " more than before training" if record.is_on_cpu else ""


def profile_lines(record: RunRecord) -> list[str]:
    """Returns lines on the profiled steps as a whole; unseen figures are left out."""
    profile = record.profile
    if profile is None:
        return []
    steps, asked = profile["steps"], (record.config.get("trainer") or {}).get("profile_steps")
    of = f" (of {asked}: training ended)" if asked and steps < asked else ""
    lines = [f"{counted(steps, 'step')}{of} recorded, {profile['step_ms']:.2f} ms each: recording costs time, too"]
    busy, copy_ms = profile["device_busy_frac"], profile["copy_ms_per_step"]
    if busy is not None and copy_ms is not None:
        lines.append(f"the GPU ran kernels {show_percent(busy)} of the time; copies take {show_ms(copy_ms)} a step")
    accelerator = record.plan.get("trainer.accelerator")
    if profile["by"] == "cpu" and accelerator is not None and accelerator["value"] == "gpu":
        lines.append("the host alone: torch recorded nothing of what the GPU did")
    lines += [
        f"{one['place']} makes the host wait for the GPU, {how_often(one['per_step'])}"
        for one in record.synchronisations or []
    ]
    return [*lines, "each of their operations: profile/trace.json of the run folder, for https://ui.perfetto.dev"]


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


OF_EVERY_RUN = frozenset({"report", "page", "steps", "metrics", "telemetry", "log", "last", "best", "profile"})
"""Names of the artifacts that every run writes; a workload's evaluation wrote the others."""
Row = tuple[str, ...]
_NAME_WIDTH = 100
"""Characters shown of the name of an operation; a kernel's may have hundreds."""


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
    folded: str = ""
    """Summary that the page shows until the section is opened; empty: all of it."""


def sections(record: RunRecord, first: Mapping[str, float] | None = None) -> list[ReportSection]:
    """Returns all sections of a run, in the order in which a reader asks. ``first``: first value of each metric."""
    begin, error = [headline(record), *state_lines(record)], error_lines(record)
    rest = [amount_line(record), *simulated_lines(record), *speed_lines(record)]
    begun = {name: show_figure(value) for name, value in (first or {}).items()}
    metrics = [(name, begun.get(name, ""), show_figure(value)) for name, value in record.metrics.items()]
    tested = [] if record.tested is None else [f"test/ is of {record.tested}"]
    plan = [(knob, show_value(one["value"]), one["source"], one["because"]) for knob, one in record.plan.items()]
    utilisation = [] if record.is_on_cpu else gpu_lines(record)
    utilisation = utilisation or host_lines(record)
    if record.swing is not None:
        utilisation.append(swing_line(record.swing))
    findings = [f"{finding['id']} ({finding['severity']}): {finding['text']}" for finding in record.findings]
    events = event_rows(record.events)
    files = [f"{name}: {path}" for name, path in own_files(record).items()]
    return [
        ReportSection("verdict", "Verdict", [*begin, *error, *rest]),
        ReportSection("findings", "What to change", findings),
        ReportSection("utilisation", "Utilisation", utilisation),
        ReportSection("time", "Where the time went", time_lines(record)),
        ReportSection("memory", "Memory", memory_lines(record)),
        ReportSection("metrics", "Metrics", tested, ("metric", "first", "latest"), metrics),
        *([ReportSection("files", "What the evaluation left", files)] if files else []),
        ReportSection("plan", "Plan", (), ("knob", "value", "source", "because"), plan),
        *profile_sections(record),
        ReportSection("machine", "Machine", machine_lines(record)),
        ReportSection("events", "Events", (), ("step", "event", "facts"), events, folded=events_line(record)),
        ReportSection("started", "Started with", started_lines(record)),
    ]


def own_files(record: RunRecord) -> dict[str, str]:
    """Returns the files of the workload's evaluation by name, relative to the run folder."""
    return {name: path for name, path in record.artifacts.items() if name not in OF_EVERY_RUN}


def profile_sections(record: RunRecord) -> list[ReportSection]:
    """Returns the operations of the profiled steps."""
    profile, lines = record.profile, profile_lines(record)
    if profile is None:
        return []
    by = "GPU" if profile["by"] == "device" else "CPU"
    head = (f"{by} ms a step", "share", "calls a step", "operation")
    rows: list[Row] = [
        (
            f"{one['ms_per_step']:.3f}",
            show_percent(one["share_frac"]),
            f"{one['calls'] / max(1, profile['steps']):.4g}",
            one["name"] if len(one["name"]) <= _NAME_WIDTH else f"{one['name'][: _NAME_WIDTH - 3]}...",
        )
        for one in profile["operations"]
    ]
    return [ReportSection("profile", "Profile of steps", lines, head, rows)]


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
    if upload := wandb_upload(record):
        lines.append(f"wandb is offline; to upload the run: {' '.join(upload)}")
    return lines


def gain_of(finding: FindingEntry) -> str:
    """Returns the gain of a finding, for after its overrides; empty without one."""
    gain = finding["gain"]["text"] if finding["gain"] and finding["change"] else ""
    return f"{gain[:1].upper()}{gain[1:]}." if gain else ""
