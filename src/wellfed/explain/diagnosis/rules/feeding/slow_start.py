"""Finds first steps that took much of the time of a run: warm-up, compilation, start of workers."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.thresholds import SLOW_START_FRAC, SLOW_START_S
from wellfed.record import WallEntry
from wellfed.units import counted, show_duration


def check(evidence: Evidence) -> Finding | None:
    """Returns a note if the first steps took much of the time. No figure contains them."""
    wall = evidence.record.wall
    if wall is not None and wall["start_s"] + wall["end_s"] >= 0.5 * evidence.wall.once_s:
        return _around_steps(evidence, wall)
    throughput, step_ms = evidence.record.throughput, evidence.steps.mean_ms
    if not throughput or step_ms is None:
        return None
    warmup, took_ms = throughput["warmup_steps"], evidence.steps.all_ms
    first_s, all_s = float(took_ms[:warmup].sum()) / 1e3, float(took_ms.sum()) / 1e3
    lost_s = first_s - warmup * step_ms / 1e3
    if lost_s < SLOW_START_S or lost_s < SLOW_START_FRAC * all_s:
        return None
    compiled = evidence.value("gpu.compile") not in (None, "none")
    why = "torch.compile compiles" if compiled else "kernels are chosen, memory is claimed, workers start"
    return Finding(
        "slow_start",
        f"The first {counted(warmup, 'step')} took {show_duration(first_s)} of {show_duration(all_s)} of training: "
        f"{why}. They are in no figure; a longer run loses no more.",
        {"first_steps_s": first_s, "training_s": all_s, "warmup_steps": warmup},
        is_note=True,
    )


def _around_steps(evidence: Evidence, wall: WallEntry) -> Finding | None:
    """Returns a note if much of the time passed before the first step or after the last."""
    around_s = wall["start_s"] + wall["end_s"]
    if around_s < SLOW_START_S or around_s < SLOW_START_FRAC * wall["total_s"]:
        return None
    return Finding(
        "slow_start",
        f"{show_duration(wall['start_s'])} passed before the first step (setting up, trainer.sanity_batches) and "
        f"{show_duration(wall['end_s'])} after the last, of {show_duration(wall['total_s'])} of training. A longer run "
        "loses no more.",
        {"start_s": wall["start_s"], "end_s": wall["end_s"], "training_s": wall["total_s"]},
        is_note=True,
    )
