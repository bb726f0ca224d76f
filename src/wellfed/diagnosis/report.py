"""report.md: what a run did, in the order a reader asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wellfed.units import show_count, show_duration, show_energy, show_percent


def to_markdown(record: Mapping[str, Any]) -> str:
    """The report of a run record."""
    parts = [
        f"# {record['workload']}: {record['run_id']}",
        _headline(record),
        *simulated_lines(record),
        *_error(record),
        "## Where the time went",
        *time_lines(record),
        *(["## GPUs", "\n".join(f"- {line}" for line in gpu_lines(record))] if record["gpus"] else []),
        "## Metrics",
        *_table(("metric", "value"), [(name, _figure(value)) for name, value in record["metrics"].items()]),
        "## Memory",
        *memory_lines(record),
        "## Plan",
        *_table(
            ("knob", "value", "source", "because"),
            [
                (knob, show_value(item["value"]), item["source"], item["because"])
                for knob, item in record["plan"].items()
            ],
        ),
        "## Events",
        *_table(
            ("step", "event", "facts"),
            [
                (
                    event["step"],
                    event["kind"],
                    ", ".join(f"{k}={v}" for k, v in event.items() if k not in ("kind", "step")),
                )
                for event in record["events"]
            ],
        ),
        "## Started with",
        f"`{' '.join(record['overrides']) or '(no overrides)'}`, seed {record['seed']}",
    ]
    return "\n\n".join(parts) + "\n"


def simulated_lines(record: Mapping[str, Any]) -> list[str]:
    """That the figures are of no real GPU, where that is so."""
    names = [gpu["name"] for gpu in record["machine"].get("gpus", ()) if gpu.get("is_simulated")]
    return (
        [f"Simulated: {', '.join(names)}. The figures show how wellfed works, not how fast a GPU is."] if names else []
    )


def speed_lines(record: Mapping[str, Any]) -> list[str]:
    """Throughput, readiness and ceiling, one line each; what was not measured is left out."""
    throughput, lines = record["throughput"], []
    if throughput:
        unit = throughput["sample_unit"]
        line = f"{show_count(throughput['samples_per_s'])} {unit}/s"
        if throughput["ci95"]:
            low, high = throughput["ci95"]
            line += f" (95 % interval {show_count(low)} to {show_count(high)})"
        lines.append(f"{line} over {throughput['steps']} steps after {throughput['warmup_steps']} of warm-up")
    if record["readiness_frac"] is not None:
        lines.append(
            f"readiness {show_percent(record['readiness_frac'])}: steps whose batch was waiting when asked for"
        )
    if record["ceiling"] and throughput:
        ceiling = record["ceiling"]["samples_per_s"]
        share = throughput["samples_per_s"] / ceiling
        reached = f"reached {show_percent(share)} of it" if share < 1 else "was no slower, so data cost it nothing"
        lines.append(
            f"ceiling {show_count(ceiling)} {throughput['sample_unit']}/s with batches already on the device: "
            f"this run {reached}"
        )
    return lines


def time_lines(record: Mapping[str, Any]) -> list[str]:
    """Speed and shares of a step."""
    lines = [f"- {line}" for line in speed_lines(record)]
    time = record["time"]
    if time:
        names = {"wait_frac": "wait", "copy_frac": "copy", "compute_frac": "compute", "host_frac": "host"}
        shares = [f"{name} {show_percent(time[key])}" for key, name in names.items() if time[key] is not None]
        lines.append(
            f"- a step takes {time['step_ms_p50']:.2f} ms (p95 {time['step_ms_p95']:.2f}): {', '.join(shares)}"
        )
    return ["\n".join(lines)] if lines else ["No step was timed."]


def gpu_lines(record: Mapping[str, Any]) -> list[str]:
    """What NVML saw of each GPU while the run trained, a line each; what was not offered is left out."""
    names = {str(gpu["index"]): gpu["name"] for gpu in record["machine"].get("gpus", ())}
    lines = []
    for index, figures in record["gpus"].items():
        parts = []
        if (util := figures.get("util_pct")) is not None:
            parts.append(f"utilisation {util['mean']:.0f} % (p5 {util['p5']:.0f}, p95 {util['p95']:.0f})")
        for key, name in (("sm_active_pct", "SMs"), ("tensor_active_pct", "tensor cores"), ("dram_active_pct", "DRAM")):
            if (active := figures.get(key)) is not None:
                parts.append(f"{name} {active['mean']:.0f} %")
        if (memory := figures.get("mem_used_gib")) is not None:
            parts.append(f"memory {memory['mean']:.1f} GiB (at most {memory['max']:.1f})")
        if (power := figures.get("power_w")) is not None:
            parts.append(f"{power['mean']:.0f} W")
        if "energy_j" in figures:
            parts.append(show_energy(figures["energy_j"]))
        if "energy_per_sample_j" in figures:
            parts.append(f"{show_energy(figures['energy_per_sample_j'])} a sample")
        if parts:
            lines.append(f"gpu {index} {names.get(index, '')}".rstrip() + f": {', '.join(parts)}")
    return lines


def memory_lines(record: Mapping[str, Any]) -> list[str]:
    """Measured against the budget and the prediction."""
    memory = record["memory"]
    if not memory:
        return ["Nothing was measured."]
    budget = "no budget" if memory["budget_gib"] is None else f"budget {memory['budget_gib']:.1f} GiB"
    predicted = memory.get("predicted_peak_gib")
    foretold = "" if predicted is None else f" ({predicted:.2f} predicted for a card)"
    return [f"{memory['device']}: peak {memory['measured_peak_gib']:.2f} GiB{foretold}, {budget}"]


def _headline(record: Mapping[str, Any]) -> str:
    return (
        f"Status **{record['status']}** after {record['steps']} steps, {record['epochs']:.2f} epochs, "
        f"{show_count(record['samples'])} samples, {show_duration(record['duration_s'])}."
    )


def _error(record: Mapping[str, Any]) -> list[str]:
    error = record["error"]
    return [f"> {error['kind']}: {error['message']} {error['advice']}".replace("\n", "\n> ")] if error else []


def _figure(value: float | None) -> str:
    """A record read back has null where the figure was not finite."""
    return "not finite" if value is None else f"{value:.5g}"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    if not rows:
        return ["None."]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in row)} |" for row in rows]
    return ["\n".join(lines)]


def show_value(value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
