"""A sweep folder as a real sweep would leave it, with every way in which a trial can end."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit.made_rows import write_rows
from wellfed.record.entries import RunRecord
from wellfed.study.points.grid import Grid, GridPoint
from wellfed.study.points.space import Choices
from wellfed.study.rows import Row
from wellfed.study.study_files import SweepFile

AXES = {
    "loader": ("baseline", "conservative", "balanced", "aggressive"),
    "memory": ("cache", "dynamic", "accumulate"),
    "gpu.precision": ("32-true", "bf16-mixed"),
}
FIXED = ("workload=recsys", "workload.data.scale=0.5")
MACHINE = "16 of 64 cores of an AMD EPYC 9534; NVIDIA RTX 4090, 24.0 GiB"
DEVICE = "NVIDIA RTX 4090"
_SPEED = {
    "baseline": 0.31,
    "conservative": 0.74,
    "balanced": 1.0,
    "aggressive": 1.03,
    "cache": 1.0,
    "dynamic": 0.55,
    "accumulate": 0.93,
    "32-true": 1.0,
    "bf16-mixed": 1.35,
}
_ENDS = {
    ("baseline", "dynamic", "32-true"): "timeout",
    ("conservative", "dynamic", "bf16-mixed"): "infeasible",
    ("balanced", "dynamic", "32-true"): "failed",
    ("aggressive", "dynamic", "bf16-mixed"): "oom",
    ("aggressive", "dynamic", "32-true"): "killed",
    ("baseline", "accumulate", "bf16-mixed"): "invalid",
    ("conservative", "accumulate", "32-true"): "pending",
}
ERRORS: Mapping[str, Mapping[str, str]] = {
    "oom": {
        "kind": "device_oom",
        "message": "CUDA ran out of memory: 21.4 of 21.6 GiB in use, 512.0 MiB asked for.",
        "advice": "Set memory.micro_batch=512.",
    },
    "failed": {
        "kind": "code",
        "message": "KeyError: '<b>\"embedding\"</b> & more'",
        "advice": "",
    },
    "killed": {"kind": "host_oom", "message": "The process was killed by signal 9.", "advice": "Use fewer workers."},
    "timeout": {"kind": "code", "message": "Not done after 120 s.", "advice": "Raise sweep.timeout_s."},
    "invalid": {
        "kind": "config",
        "message": "loader.prefetch_factor=4: has no effect without worker processes.",
        "advice": "",
    },
    "infeasible": {
        "kind": "config",
        "message": "gpu.memory_gib: the budget is 21.6 GiB, predicted 30.2 GiB.",
        "advice": "Set memory.micro_batch=512.",
    },
}


def sweep_file(
    axes: Mapping[str, Sequence[str]] = AXES, fixed: Sequence[str] = FIXED, name: str = "quick", **more: str
) -> SweepFile:
    grid = Grid({axis: tuple(values) for axis, values in axes.items()}, tuple(fixed))
    ids = tuple(point.id for point in grid.points())
    given = {"workload": "recsys", "sample_unit": "triplets", "code": "56d4f5d", **more}
    space = {axis: Choices(values) for axis, values in grid.axes.items()}
    return SweepFile(name=name, space=space, fixed=grid.fixed, ids=ids, **given)


def row(point: GridPoint, rate: float | None = 1000.0, *, own: float | None = 0.01, **more: Any) -> Row:
    """An ok trial of a point; ``own``: half width of its own interval, as a fraction."""
    figures: dict[str, Any] = {
        "point": point.id,
        "kind": "trial",
        "overrides": point.overrides,
        "status": "ok",
        "attempt": 1,
        "samples_per_s": rate,
        "seconds": 41.5,
        "ci95": None if own is None or rate is None else (rate * (1 - own), rate * (1 + own)),
        "steps": 200,
        "device": DEVICE,
        "folder": point.id,
        "started_at": "2026-11-21T18:00:00+00:00",
        "exit_code": 0,
        "code": "56d4f5d",
        "machine": "a CPU, 4 cores",
        **more,
    }
    return Row(**figures)


def failed_row(point: GridPoint, status: str, **more: Any) -> Row:
    ran = status not in ("invalid", "infeasible")
    lines = ("Traceback (most recent call last):", "  <module> & co", ERRORS[status]["message"]) if ran else ()
    figures = {
        "own": None,
        "status": status,
        "error": ERRORS[status],
        "exit_code": {"oom": 3, "failed": 1, "killed": -9, "timeout": -15}.get(status),
        "stderr": lines,
        "seconds": 22.0 if ran else 0.0,
        "folder": point.id if ran else "",
        **more,
    }
    return row(point, None, **figures)


def rate_of(point: GridPoint, draw: random.Random) -> float:
    speed = math.prod(_SPEED.get(value, 1.0) for value in point.values.values())
    return 61_000 * speed * math.exp(draw.gauss(0, 0.01))


def rows(sweep: SweepFile, *, confirms: int = 3) -> list[Row]:
    """All ends of `_ENDS`, the other points ok, the three fastest measured again."""
    draw = random.Random(7)
    found: list[Row] = []
    points = {point.id: point for point in sweep.points}
    for point in points.values():
        status = _ENDS.get(tuple(point.values.values()), "ok")
        if status == "pending":
            continue
        if status != "ok":
            found.append(failed_row(point, status))
            continue
        rate = rate_of(point, draw)
        found.append(row(point, rate, **_figures(point, rate)))
    best = sorted((each for each in found if each.status == "ok"), key=lambda each: -(each.samples_per_s or 0))[:3]
    for number in range(1, confirms + 1):
        for each in best:
            again = rate_of(points[each.point], draw)
            folder = f"{each.point}.confirm{number}"
            figures = _figures(points[each.point], again)
            found.append(
                row(points[each.point], again, kind="confirm", attempt=number, **{**figures, "folder": folder})
            )
    return found


def _figures(point: GridPoint, rate: float) -> dict[str, Any]:
    slow = point.values.get("loader") == "baseline"
    peak = {"cache": 9.4, "dynamic": 17.9, "accumulate": 5.1}.get(point.values.get("memory", ""), 7.0)
    halved = 0.62 if point.values.get("gpu.precision") == "bf16-mixed" else 1.0
    return {
        "readiness_frac": 0.22 if slow else 0.995,
        "ceiling_samples_per_s": rate / (0.35 if slow else 0.97),
        "peak_memory_gib": peak * halved,
        "predicted_peak_gib": peak * halved * 1.04,
        "util_pct": 34.0 if slow else 96.0,
    }


PLAN = {
    "loader.backend": "threads",
    "loader.num_workers": 6,
    "loader.prefetch_factor": 8,
    "loader.persistent_workers": False,
    "loader.pin_memory": True,
    "loader.device_prefetch": 2,
    "loader.timeout_s": 0,
    "memory.features": "cache",
    "memory.micro_batch": 512,
    "memory.accumulate": 4,
    "memory.checkpoint_activations": False,
    "memory.on_oom": "retry",
    "gpu.precision": "bf16-mixed",
}
CONFIG = {
    "loader": {"backend": "auto", "num_workers": None, "skip_ids": [3], "max_skipped": 5},
    "memory": {
        "features": None,
        "on_oom": "retry",
    },
}


def _entries(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {knob: {"value": value, "because": f"why {knob}", "source": "measured"} for knob, value in plan.items()}


def write_record(folder: Path, *, plan: Mapping[str, Any] = PLAN, config: Mapping[str, Any] = CONFIG) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = RunRecord.read(folder) if (folder / "run.json").exists() else RunRecord(run_id=folder.name, status="ok")
    record.workload, record.plan, record.config = "recsys", _entries(plan), dict(config)
    record.started_at, record.exit_code = "2026-11-21T18:00:00+00:00", 0
    record.write(folder)


def write(folder: Path, sweep: SweepFile | None = None, made: Sequence[Row] | None = None) -> Path:
    """The folder with its files, and a record for each trial that was started."""
    sweep = sweep or sweep_file()
    made = rows(sweep) if made is None else made
    folder.mkdir(parents=True, exist_ok=True)
    sweep.write(folder)
    write_rows(folder, made, workload="recsys", plan=_entries(PLAN), config=dict(CONFIG))
    return folder
