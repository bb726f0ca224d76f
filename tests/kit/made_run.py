"""Makes run folders of any size for tests: a record and its tables, as a run would have left them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wellfed.record.entries import RunRecord

HOST = -1


def made_run(
    folder: Path,
    *,
    steps: int = 200,
    step_ms: float = 50.0,
    gpus: int = 1,
    period_s: float = 0.0,
    interval_s: float = 0.5,
    is_mig: bool = False,
    has_telemetry: bool = True,
    metrics: Mapping[str, Sequence[str]] | None = None,
    log_every: int = 10,
    **record: Any,
) -> RunRecord:
    """Writes a run of even steps with some noise. Utilisation swings from 9 to 90 % with the period, else it is 60 %.

    Args:
        metrics: splits of each metric.
        record: more of run.json.
    """
    rng = np.random.default_rng(0)
    times_s = 10 + np.cumsum(step_ms / 1e3 * rng.uniform(0.8, 1.2, steps))
    end_s = float(times_s[-1]) if steps else 10.0
    if steps:
        wait_ms = 0.3 * step_ms * rng.uniform(0.2, 1.8, steps)
        _write(
            folder / "steps.csv",
            {
                "step": np.arange(1, steps + 1),
                "time_s": times_s,
                "epoch": np.arange(steps) // 100,
                "samples": np.full(steps, 64),
                "micro_batch": np.full(steps, 64),
                "num_micro": np.full(steps, 1),
                "wait_ms": wait_ms,
                "copy_ms": np.full(steps, 0.05 * step_ms) if gpus else None,
                "compute_ms": np.full(steps, 0.6 * step_ms),
                "host_ms": np.full(steps, 0.05 * step_ms),
                "ready": np.zeros(steps),
            },
        )
    if has_telemetry:
        _write_telemetry(folder, end_s, gpus, period_s, interval_s, step_ms, is_mig)
    names = {"loss": ("train", "val"), "ndcg_at_10": ("val",)} if metrics is None else metrics
    _write_metrics(folder, names, steps, log_every, step_ms)
    found = RunRecord(
        **{
            "run_id": "2026-01-01_00-00-00_abcd",
            "status": "ok",
            "workload": "recsys",
            "seed": 3,
            "started_at": "2026-01-01T00:00:00+00:00",
            "steps": steps,
            "samples": 64 * steps,
            "epochs": steps / 100,
            "duration_s": end_s,
            "machine": {
                "cpu": "A CPU",
                "cpu_quota_cores": 4.0,
                "ram_gib": 32.0,
                "os": "Linux",
                "versions": {"python": "3.11"},
                "gpus": [
                    {"index": gpu, "name": "NVIDIA H200", "memory_gib": 139.8, "capability": "9.0", "is_mig": is_mig}
                    for gpu in range(gpus)
                ],
            },
            "events": [{"kind": "checkpoint", "step": steps, "time_s": end_s, "file": "last.ckpt"}],
            "metrics": {f"{split}/{name}": 0.5 for name, splits in names.items() for split in splits},
            "plan": {"loader.num_workers": {"value": 3, "because": "one less than the cores", "source": "predicted"}},
            "memory": {"device": "NVIDIA H200", "budget_gib": 7.2, "predicted_peak_gib": 5.0, "measured_peak_gib": 5.5},
            **record,
        },
    )
    found.write(folder)
    return found


def _write(path: Path, columns: Mapping[str, Any]) -> None:
    number = max(len(column) for column in columns.values() if column is not None)
    cells = [[""] * number if column is None else [f"{x:.6g}" for x in column.tolist()] for column in columns.values()]
    lines = [",".join(columns), *(",".join(row) for row in zip(*cells, strict=True))]
    path.write_text("\n".join(lines) + "\n")


def _write_telemetry(
    folder: Path, end_s: float, gpus: int, period_s: float, interval_s: float, step_ms: float, is_mig: bool
) -> None:
    rng = np.random.default_rng(1)
    names = ("time_s", "step", "phase", "gpu", "util_pct", "mem_used_gib", "sm_active_pct", "cpu_pct", "rss_gib")
    at_s = np.arange(10, end_s, interval_s)
    is_high = at_s % period_s < period_s / 2 if period_s else np.ones(len(at_s), bool)
    util_pct = np.where(is_high, 90 if period_s else 60, 9) + rng.uniform(-4, 4, len(at_s))
    share = np.arange(len(at_s)) / max(1, len(at_s))
    phases = np.where((share > 0.45) & (share < 0.52), "validate", np.where(share > 0.97, "test", "train"))
    with (folder / "telemetry.csv").open("w") as stream:
        stream.write(",".join(names) + "\n")
        for place, time_s in enumerate(at_s.tolist()):
            about = f"{time_s:.6g},{int((time_s - 10) / step_ms * 1e3)},{phases[place]}"
            util = "" if is_mig else f"{util_pct[place]:.4g}"
            rows = [f"{about},{gpu},{util},{4 + gpu / 8:.4g},{util_pct[place] / 2:.4g},,\n" for gpu in range(gpus)]
            stream.write("".join(rows) + f"{about},-1,,,,{150 + 40 * share[place]:.4g},2.5\n")


def _write_metrics(
    folder: Path, names: Mapping[str, Sequence[str]], steps: int, log_every: int, step_ms: float
) -> None:
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream:
        rows = csv.writer(stream)
        rows.writerow(("step", "epoch", "time_s", "split", "name", "value"))
        for step in range(log_every, steps + 1, log_every):
            for name, splits in names.items():
                for split in splits:
                    if split == "train" or step % (10 * log_every) == 0:
                        at_s = f"{10 + step * step_ms / 1e3:.6g}"
                        rows.writerow((step, step // 100, at_s, split, name, f"{1 / (1 + step / steps):.6g}"))
