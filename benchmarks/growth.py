"""Measures what grows with the length of a run and the numbers of runs, trials and samples.

    python benchmarks/growth.py [--rounds 3] [--only steps runs ledger loader week reports] [--small] [--out RECORD]

- steps: a whole run less its steps, from the call to the return, in a process that has imported everything; by the
  number of steps. `loop.py` has the loop and its settings.
- runs: `wellfed runs` as a command, by the number of run folders.
- ledger: a board made of a sweep's ledger, and adding a row to it, by the number of rows;
  axes have ten values each.
- loader: memory that a loader adds while it delivers, by the number of samples; the samples themselves take none.
- week: writing telemetry.csv through the run's own writer, with a clock that runs ahead: readings of a GPU and
  the host twice a second. Time for a reading, and memory that the process gains, by the hours written.
- reports: reading, judging and drawing a run folder (`tests/kit/made_run.py`), by its steps of 0.6 s with telemetry
  twice a second; a million steps are a week.

Each measurement is a process of its own, but for steps. `--small` leaves the largest sizes out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import finish  # noqa: E402

STEP_MS = 600.0
LEDGER = """
import json, sys, time
from pathlib import Path
from wellfed.study import ledger
from wellfed.study.ledger import Ledger
from wellfed.study.points.grid import Grid
from wellfed.study.ranking.ranking import board_of
from wellfed.study.row import Row
from wellfed.study.study_files import SweepFile
folder, number = Path(sys.argv[1]), int(sys.argv[2])
grid = Grid({f"knob{n}": tuple(map(str, range(10))) for n in range(len(sys.argv[2]) - 1)})
points = grid.points()
file = SweepFile(name="made", workload="recsys", code="c", fixed=(), ids=tuple(p.id for p in points),
                 sample_unit="samples", axes=grid.axes)
file.write(folder)
def row(place, point):
    rate = 1000.0 + (place * 7919) % 1000
    return Row(point.id, "trial", point.overrides, "ok", 1, samples_per_s=rate, ci95=(rate - 9, rate + 9), steps=100,
               seconds=3.0, peak_memory_gib=1 + place % 7, device="cpu", code="c", folder=point.id)
rows = [row(*each) for each in enumerate(points)]
ledger.append(folder, rows[:-20])
book = Ledger(folder, file.ranked_by, "c")
book.latest
began_s = time.perf_counter()
for each in rows[-20:]:
    book.append(each)
    book.latest
added_s = time.perf_counter() - began_s
began_s = time.perf_counter()
board = board_of(folder)
took_s = time.perf_counter() - began_s
assert len(board.entries) == number
print(json.dumps({"ranking a ledger [s]": took_s, "adding a row to a ledger [ms]": 1000 * added_s / 20}))
"""
LOADER = """
import json, sys
import psutil, torch
from contextlib import closing
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
class Counted:
    def __len__(self): return int(sys.argv[2])
    def __getitem__(self, index): return torch.tensor(index)
    def fetch(self, indices, rng): return {"x": indices.float()}
def delivered(data, num):
    plan = LoaderSettings("threads", num_workers=1, prefetch_factor=8)
    with closing(train_loader(data, batch_size=512, seed=0, settings=plan)) as loader:
        for number, _ in enumerate(loader):
            if number == num:
                return psutil.Process().memory_info().rss
class Few(Counted):
    def __len__(self): return 100_000
before = delivered(Few(), 100)
print(json.dumps({"memory of a loader [MiB]": max(0, delivered(Counted(), 100) - before) / 2**20}))
"""
WEEK = """
import json, sys, time
import psutil
from pathlib import Path
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.telemetry.series import Sample
from wellfed.record import RunRecord
journal = Journal(RunRecord.start("week"), Path(sys.argv[1]))
values = {"util_pct": 71.0, "mem_used_gib": 5.25, "power_w": 310.5, "temp_c": 61.0, "sm_clock_mhz": 1500.0}
def read(number):
    at_s = number / 2
    host = Sample(at_s, number, "train", -1, {"cpu_pct": 140.0, "rss_gib": 3.5})
    return [Sample(at_s, number, "train", 0, values), host]
rounds = int(3600 * float(sys.argv[2]) * 2)
for number in range(100):
    journal.telemetry(read(number))
before = psutil.Process().memory_info().rss
for number in range(rounds):
    if number == rounds - min(rounds, 1000):
        began_s = time.perf_counter()
    journal.telemetry(read(number))
each_ms = 1000 * (time.perf_counter() - began_s) / min(rounds, 1000)
gained = (psutil.Process().memory_info().rss - before) / 2**20
print(json.dumps({"writing a reading [ms]": each_ms, "memory of a run's telemetry [MiB]": max(0.0, gained)}))
"""
REPORT = """
import json, sys, time
from pathlib import Path
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
from wellfed.explain.report.write import write_reports
began_s, folder = time.perf_counter(), Path(sys.argv[1])
evidence = Evidence.read(folder)
conclude(evidence)
write_reports(evidence, folder)
took_s = time.perf_counter() - began_s
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**10  # getrusage has the parent's
size = (folder / "report.html").stat().st_size / 2**10
print(json.dumps({"both reports of a run [s]": took_s, "memory of its reports [MiB]": peak, "its page [KiB]": size}))
"""


def python(program: str, *words: object) -> dict[str, float]:
    """Returns the figures that a Python of its own prints."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **paths}, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_steps(number: int, scratch: Path) -> dict[str, float]:
    """Seconds of a run beside its steps."""
    from benchmarks import loop

    with loop.prepared() as folder:
        began_s = time.perf_counter()
        steps = loop.watched("ours", number, folder)
        whole_s = time.perf_counter() - began_s
    return {"a run beside its steps [s]": whole_s - steps.seconds()}


def of_runs(number: int, scratch: Path) -> dict[str, float]:
    """Seconds of `wellfed runs`."""
    from wellfed.record import RunRecord

    logs = scratch / f"runs{number}" / "logs"
    for place in range(0 if logs.exists() else number):
        name = f"2026-01-{1 + place // 1440 % 28:02d}_{place // 60 % 24:02d}-{place % 60:02d}-00_{place:04x}"
        folder = logs / "recsys" / "runs" / name
        folder.mkdir(parents=True)
        RunRecord(name, workload="recsys", status="ok", started_at="2026-01-01T00:00:00+00:00").write(folder)
    began_s = time.perf_counter()
    words = [sys.executable, "-m", "wellfed", "runs", "--log-dir", str(logs)]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True, capture_output=True)
    return {"`wellfed runs` [s]": time.perf_counter() - began_s}


def of_ledger(number: int, scratch: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return python(LEDGER, folder, number)


def of_loader(number: int, scratch: Path) -> dict[str, float]:
    return python(LOADER, scratch, number)


def of_week(hours: int, scratch: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return python(WEEK, folder, hours)


def of_reports(number: int, scratch: Path) -> dict[str, float]:
    from tests.kit.made_run import made_run

    folder = scratch / f"steps_{number}"
    if not folder.exists():
        folder.mkdir()
        rate = {"samples_per_s": 106.0, "ci95": [105.0, 107.0], "warmup_steps": 3, "sample_unit": "samples"}
        shares = {"wait_frac": 0.3, "copy_frac": 0.05, "compute_frac": 0.6, "host_frac": 0.05}
        made_run(
            folder,
            steps=number,
            step_ms=STEP_MS,
            period_s=9.5,
            log_every=50,
            throughput={**rate, "steps": number - 3},
            time={**shares, "step_ms_p50": STEP_MS, "step_ms_p95": STEP_MS, "launch_ms_p50": 1.0},
            readiness_frac=0.1,
            ceiling={"samples_per_s": 160.0},
        )
    return python(REPORT, folder)


CURVES: dict[str, tuple[str, tuple[int, ...], Callable[[int, Path], dict[str, float]]]] = {
    "steps": ("steps", (100, 1_000, 10_000, 100_000), of_steps),
    "runs": ("runs", (50, 500, 5_000), of_runs),
    "ledger": ("rows", (100, 1_000, 10_000), of_ledger),
    "loader": ("samples", (1_000_000, 10_000_000, 30_000_000), of_loader),
    "week": ("hours", (1, 24, 168), of_week),
    "reports": ("steps", (1_000, 100_000, 1_000_000), of_reports),
}
"""Unit and sizes of each curve, and what measures it."""
ONCE = 20.0
"""Seconds; a measurement that takes longer is made once."""
LONGEST_S = 150.0
"""Seconds; a size that would take longer, judged by the one before, is left out: this machine is too slow or busy."""


def points_of(curve: dict[str, Any]) -> str:
    """Returns the medians of a curve as a text."""
    return ", ".join(f"{each['median']:.3g} at {each['size']:,} {curve['by']}" for each in curve["points"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--small", action="store_true", help="leave the largest sizes out")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found: defaultdict[tuple[str, str], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.only:
            unit, sizes, measure = CURVES[name]
            took_s: dict[int, float] = {}
            for _ in range(chosen.rounds):
                for size in sizes[: -1 if chosen.small else None]:
                    before = max((each for each in took_s if each < size), default=size)
                    if took_s.get(size, 0.0) > ONCE or took_s.get(before, 0.0) * size / before > LONGEST_S:
                        continue
                    began_s = time.perf_counter()
                    figures = measure(size, Path(scratch))
                    took_s[size] = time.perf_counter() - began_s
                    print(f"{name} {size:,}: {figures} ({took_s[size]:.0f} s)", flush=True)
                    for what, value in figures.items():
                        found[what, unit][size].append(value)
    curves: list[dict[str, Any]] = [
        {
            "what": what,
            "by": unit,
            "points": [
                {"size": size, "n": len(values), "median": float(f"{statistics.median(values):.4g}")}
                for size, values in by_size.items()
            ],
        }
        for (what, unit), by_size in found.items()
    ]
    says = "; ".join(f"{curve['what']} {points_of(curve)}" for curve in curves)
    config = {"rounds": chosen.rounds, "step_ms": STEP_MS}
    finish("growth", [], f"{says}.", chosen.out, config=config, curves=curves)


if __name__ == "__main__":
    main()
