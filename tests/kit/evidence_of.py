"""Makes evidence for rules' tests: a run of even steps, of which a test changes what it is about."""

from dataclasses import replace
from typing import Any

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.observe.timing.step_clock import PHASE_COLUMNS
from wellfed.record.entries import RunRecord, WallEntry


def walled(*, steps_s: float, callbacks: dict[str, float] | None = None, **parts_s: float) -> WallEntry:
    """The wall time of a training, as run.json has it."""
    names = ("start_s", "validation_s", "checkpoint_s", "epoch_end_s", "logging_s", "end_s", "other_s")
    parts = {"steps_s": steps_s, **dict.fromkeys(names, 0.0), **parts_s}
    assert len(parts) == len(names) + 1
    hooks = callbacks or {}
    total_s = sum(parts.values()) + sum(hooks.values())
    return {"total_s": total_s, **parts, "callbacks": hooks}  # type: ignore[typeddict-item]


def evidence(
    *,
    steps: int = 100,
    wait_ms: float = 0.0,
    compute_ms: float = 10.0,
    host_ms: float = 0.1,
    copy_ms: float | None = None,
    ceiling: float | None = None,
    plan: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    cores: float = 8.0,
    curves: Any = None,
    losses: Any = None,
    columns: dict[str, Any] | None = None,
    **record: Any,
) -> Evidence:
    """Returns the evidence of a run whose steps of 128 samples take this long; with ``copy_ms``: on a GPU.

    Args:
        ceiling: over the rate.
        columns: of steps.csv, in place of even ones.
    """
    step_ms = wait_ms + compute_ms + host_ms + (copy_ms or 0.0)
    rate = 128e3 / step_ms
    of_run = RunRecord(
        "run",
        status="ok",
        steps=steps,
        samples=128 * steps,
        plan={name: {"value": value, "because": "", "source": "set"} for name, value in (plan or {}).items()},
        config=config or {},
        machine={"cpu_quota_cores": cores},
        throughput={
            "samples_per_s": rate,
            "ci95": [0.98 * rate, 1.02 * rate],
            "steps": steps,
            "warmup_steps": 0,
            "sample_unit": "samples",
        },
        ceiling=None if ceiling is None else {"samples_per_s": ceiling * rate},
        time={
            "wait_frac": wait_ms / step_ms,
            "copy_frac": None if copy_ms is None else copy_ms / step_ms,
            "compute_frac": compute_ms / step_ms,
            "host_frac": host_ms / step_ms,
            "step_ms_mean": step_ms,
            "step_ms_p50": step_ms,
            "step_ms_p95": step_ms,
            "launch_ms_p50": None,
            **dict.fromkeys(("forward_frac", "backward_frac", "optimizer_frac", "phase_steps", *PHASE_COLUMNS)),
        },
    )
    table = {
        "step": np.arange(1.0, steps + 1),
        "time_s": np.cumsum(np.full(steps, step_ms / 1e3)),
        "epoch": np.zeros(steps),
        "wait_ms": np.full(steps, wait_ms),
        "copy_ms": np.full(steps, np.nan if copy_ms is None else copy_ms),
        "compute_ms": np.full(steps, compute_ms),
        "host_ms": np.full(steps, host_ms),
        **(columns or {}),
    }
    given = {} if losses is None else {"losses": losses}
    return Evidence(replace(of_run, **record), table, curves or {}, **given)
