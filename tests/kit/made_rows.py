"""Rows of a study on disk: each in the folder of its trial, as a study leaves it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wellfed.record.entries import RunRecord
from wellfed.study.rows import Row
from wellfed.study.trial_end import ERR


def folder_name(row: Row) -> str:
    return row.point if row.kind == "trial" else f"{row.point}.{row.kind}{row.attempt}"


def write_rows(study: Path, rows: Iterable[Row], **entries: Any) -> None:
    """Writes a record for each row; ``entries`` are further ones of all."""
    for number, row in enumerate(rows):
        folder = study / folder_name(row)
        folder.mkdir(parents=True, exist_ok=True)
        record = RunRecord(
            folder.name, overrides=[*row.overrides], status=row.status, exit_code=row.exit_code, **entries
        )
        record.started_at, record.error = row.started_at, row.error  # type: ignore[assignment]
        if row.samples_per_s is not None:
            ci95 = None if row.ci95 is None else [*row.ci95]
            steps = {"steps": row.steps, "warmup_steps": 0, "sample_unit": "triplets"}
            record.throughput = {"samples_per_s": row.samples_per_s, "ci95": ci95, **steps}  # type: ignore[typeddict-item]
        if row.ceiling_samples_per_s is not None:
            record.ceiling = {"samples_per_s": row.ceiling_samples_per_s}
        record.readiness_frac = row.readiness_frac
        peaks = {"measured_peak_gib": row.peak_memory_gib, "predicted_peak_gib": row.predicted_peak_gib}
        record.memory = {name: peak for name, peak in peaks.items() if peak is not None}  # type: ignore[assignment]
        record.memory["device"] = row.device
        if row.util_pct is not None or row.energy_per_sample_j is not None:
            util = None if row.util_pct is None else {"mean": row.util_pct}
            record.gpus = {"0": {"util_pct": util, "energy_per_sample_j": row.energy_per_sample_j}}
        if row.machine:
            record.machine = {"cpu": row.machine.partition(",")[0], "cpu_quota_cores": 4}
        if row.stderr:
            (folder / ERR).write_text("\n".join(row.stderr))
        record.trial = {
            "code": row.code,
            "attempt": row.attempt,
            "number": row.trial,
            "seconds": row.seconds,
            "ended_at": row.ended_at or f"2026-11-21T19:00:00.{number:06}+00:00",
        }
        record.write(folder)
