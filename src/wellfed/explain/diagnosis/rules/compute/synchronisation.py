"""Finds lines of a model at which the host waits for the GPU in each step."""

from __future__ import annotations

from collections.abc import Sequence

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.device_load import device_load
from wellfed.record import SynchronisationEntry
from wellfed.units import show_percent

_NAMED = 3


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the host waits for the card, and the card then for the host."""
    load = device_load(evidence)
    if load is None or load.limit != "synchronisation":
        return None
    lines = load.synchronisations
    return Finding(
        "synchronisation",
        f"The GPU is busy for {show_percent(load.busy_frac)} of the compute time of a step. The host waits for it at "
        f"{places(lines)}, and the GPU then waits for the host to launch the next kernels. Keep such "
        "values on the device (no .item(), .cpu(), or `if` on a tensor), and read them every 50 steps instead of in "
        "each.",
        {
            "busy_frac": load.busy_frac,
            "full_frac": load.full_frac,
            "synchronisations_per_step": sum(one["per_step"] for one in lines),
            "place": lines[0]["place"],
        },
        gain=load.without_synchronisation,
    )


def places(lines: Sequence[SynchronisationEntry]) -> str:
    """Returns the most frequent lines as text."""
    named = ", ".join(f"{one['place']} ({how_often(one['per_step'])})" for one in lines[:_NAMED])
    return named + (f" and {len(lines) - _NAMED} lines more" if len(lines) > _NAMED else "")


def how_often(per_step: float) -> str:
    """Returns a frequency as text: ``once a step``."""
    if per_step >= 1.5:
        return f"{per_step:.0f} times a step"
    return "once a step" if per_step > 0.75 else f"every {1 / max(per_step, 1e-3):.0f} steps"
