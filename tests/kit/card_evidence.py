"""Makes evidence of runs on a GPU for rules' tests: what its card reported, how fast the host launched."""

from typing import Any

import numpy as np

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence

PLAN = {
    "gpu.precision": "bf16-mixed",
    "gpu.tf32": True,
    "gpu.compile": "none",
    "memory.micro_batch": 128,
    "memory.accumulate": 1,
    "memory.checkpoint_activations": False,
    "workload.effective_batch_size": 128,
    "loader.pin_memory": True,
    "loader.device_prefetch": 2,
    "loader.num_workers": 2,
}


def on_card(
    *,
    launch_frac: float | None = 0.3,
    num_micro: int = 1,
    used_frac: float = 0.3,
    capability: str = "9.0",
    plan: dict[str, Any] | None = None,
    readings: int = 30,
    columns: dict[str, Any] | None = None,
    card: dict[str, Any] | None = None,
    table_gib: float | None = None,
    **given: Any,
) -> Evidence:
    """Returns the evidence of a healthy run on a full card of 24 GiB. ``card``: figures of NVML; None: not reported."""
    figures = {"util_pct": 98.0, "sm_active_pct": 90.0, "tensor_active_pct": 30.0, "dram_active_pct": 30.0} | (
        card or {}
    )
    curves = {name: np.broadcast_to(value, readings) for name, value in figures.items() if value is not None}
    compute_ms = given.setdefault("compute_ms", 10.0)
    given.setdefault("copy_ms", 0.01)
    given.setdefault("machine", {"gpus": [{"index": 0, "memory_gib": 24.0, "capability": capability}], "ram_gib": 64.0})
    return evidence(
        plan=PLAN | {"memory.micro_batch": 128 // num_micro, "memory.accumulate": num_micro} | (plan or {}),
        curves={0: {"time_s": 0.5 * np.arange(readings), **curves}},
        columns={
            "micro_batch": np.full(100, 128.0 // num_micro),
            "num_micro": np.full(100, float(num_micro)),
            "launch_ms": np.full(100, np.nan if launch_frac is None else launch_frac * compute_ms),
            **(columns or {}),
        },
        memory={"budget_gib": 20.0, "measured_peak_gib": 20.0 * used_frac, "feature_table_gib": table_gib},
        **given,
    )
