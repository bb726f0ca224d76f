"""Makes evidence of runs on several ranks that step together, of which a test makes one rank different."""

from typing import Any

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence

STEP_MS = 100.0
USUAL = {"wait": 1.0, "copy": 0.0, "forward": 30.0, "optimizer": 5.0, "host": 4.0}
"""Milliseconds of a rank's own work; the backward pass takes the rest of the step."""


def rank(number: int, *, node: int = 0, step_ms: float = STEP_MS, **given: Any) -> dict[str, Any]:
    """Returns the entry of a rank; milliseconds of parts by their names, other keys as they are."""
    parts = USUAL | {name: given.pop(name) for name in [*given] if name in USUAL}
    outside_ms = parts["wait"] + parts["copy"] + parts["host"]
    backward_ms = step_ms - sum(parts.values())
    return {
        **{"rank": number, "node": node, "gpu": None, "host": f"node-{'ab'[node]}", "steps": 100},
        **{f"{name}_frac": ms / step_ms for name, ms in parts.items()},
        **{"compute_frac": 1 - outside_ms / step_ms, "backward_frac": backward_ms / step_ms, "step_ms_mean": step_ms},
        **{
            "readiness_frac": 1.0,
            "peak_gib": 1.0,
            "work_half_ms": 1.0,
            "between_half_ms": 1.0,
        },
        **given,
    }


def of_ranks(*ranks: dict[str, Any], plan: dict[str, Any] | None = None, **record: Any) -> Evidence:
    """Returns the evidence of rank 0, whose step has the parts of the first of the ranks."""
    first = ranks[0]
    wait_ms, host_ms = (first[f"{name}_frac"] * first["step_ms_mean"] for name in ("wait", "host"))
    compute_ms = first["step_ms_mean"] - wait_ms - host_ms
    knobs = {"trainer.strategy": "ddp", "memory.on_oom": "retry", "loader.num_workers": 1} | (plan or {})
    return evidence(wait_ms=wait_ms, compute_ms=compute_ms, host_ms=host_ms, plan=knobs, ranks=[*ranks], **record)
