"""Makes evidence of runs whose steps wait for data, for the tests of the rules on loading."""

from typing import Any

import numpy as np

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.telemetry.series import HOST


def fed_by(
    workers: int,
    *,
    build_ms: float | Series,
    step_ms: float = 10.0,
    wait_ms: float | Series | None = None,
    cpu_frac: float | None = 0.05,
    cores: float = 8.0,
    cpu_pct: float | None = None,
    others_pct: float = 0.0,
    loader_pct: float | None = None,
    lock_pct: float | None = None,
    iowait_pct: float = 0.0,
    backend: str | None = None,
    steps: int = 200,
    loader: dict[str, Any] | None = None,
    loading: dict[str, Any] | None = None,
    epoch: Series | None = None,
    on_gpu: bool = False,
    plan: dict[str, Any] | None = None,
    **more: Any,
) -> Evidence:
    """Steps of ``step_ms`` beside waiting; by default they wait as long as building over all workers takes longer.

    Args:
        cpu_pct: of the run; None = one core for the steps, and what building takes.
    """
    builds = np.broadcast_to(np.asarray(build_ms, float), steps)
    mean_ms, rest_ms = float(builds.mean()), step_ms + 0.1
    if wait_ms is None:
        wait_ms = mean_ms if not workers else max(0.0, mean_ms / workers - rest_ms)
    waits = np.broadcast_to(np.asarray(wait_ms, float), steps)
    whole_ms = rest_ms + float(waits.mean())
    if cpu_pct is None:
        cpu_pct = 100 * (rest_ms + mean_ms * (cpu_frac or 0.0)) / whole_ms
    columns: dict[str, Any] = {"wait_ms": waits}
    if cpu_frac is not None:
        columns |= {"build_ms": builds, "build_cpu_ms": cpu_frac * builds}
        loading = {"build_ms_mean": mean_ms, "cpu_frac": cpu_frac, "has_fetch": False, **(loading or {})}
    if epoch is not None:
        columns["epoch"] = epoch
    given = {"backend": backend or ("processes" if workers else "inline"), "num_workers": workers, **(loader or {})}
    curves = {
        "cpu_pct": np.full(10, cpu_pct),
        "others_cpu_pct": np.full(10, others_pct),
        "iowait_pct": np.full(10, iowait_pct),
    }
    for name, pct in (("loader_cpu_pct", loader_pct), ("loader_lock_pct", lock_pct)):
        if pct is not None:
            curves[name] = np.full(10, pct)
    return evidence(
        steps=steps,
        wait_ms=float(waits.mean()),
        compute_ms=step_ms,
        copy_ms=0.0 if on_gpu else None,
        cores=cores,
        columns=columns,
        plan={f"loader.{name}": value for name, value in given.items()} | (plan or {}),
        config={"loader": given},
        curves={HOST: curves},
        loading=loading or {},
        **more,
    )
