"""What does it take to look at a run? Time of its reports, of `diagnose` and `runs`, and CPU time of the monitor.

    python benchmarks/seeing.py [--rounds 5] [--steps 200,20000,1000000] [--out RECORD]

Run folders are made up (`tests/kit/made_run.py`): even steps of 20 ms with noise, one GPU that swings, readings
twice a second, a row of metrics every 50 steps. Each measurement is a process of its own, as after a run whose Python
has drawn nothing yet; the kinds take turns. The fake driver of the tests plays the cards that the monitor watches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.write_record import write_record  # noqa: E402
from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario, Wave  # noqa: E402
from tests.kit.made_run import made_run  # noqa: E402
from wellfed.record import RunRecord, git_state  # noqa: E402

STEP_MS, LOG_EVERY, NUM_RUNS, MONITOR_S = 20.0, 50, 1000, 20.0
START_S = 3.0
RATE = {"samples_per_s": 3200.0, "ci95": [3100.0, 3300.0], "warmup_steps": 3, "sample_unit": "samples"}
WRITE = """
import json, sys, time
from pathlib import Path
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import conclude
marks = [time.perf_counter()]
folder = Path(sys.argv[1])
evidence = Evidence.read(folder)
marks.append(time.perf_counter())
conclude(evidence)
marks.append(time.perf_counter())
from wellfed.explain.report.write import write_reports
write_reports(evidence, folder)
marks.append(time.perf_counter())
read, judged, drawn = (after - before for before, after in zip(marks, marks[1:]))
print(json.dumps({"read_s": read, "judge_s": judged, "draw_s": drawn, "total_s": read + judged + drawn}))
"""


def python(*words: str, cwd: Path, **environment: str) -> str:
    """What a Python of its own prints; it must succeed."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, **paths, **environment}, check=True, capture_output=True
    )
    return done.stdout.decode()


def elapsed_s(*words: str, cwd: Path) -> float:
    """Wall time of a command."""
    began_at_s = time.perf_counter()
    python("-m", "wellfed", *words, cwd=cwd)
    return time.perf_counter() - began_at_s


def monitor_cpu_frac(cards: int, scratch: Path, driver: FakeDriver) -> float:
    """CPU time of the monitor while it watches, as a share of one core; what it takes to start is left out."""
    scenario = Scenario([FakeGpu(f"GPU-{number}", util=Wave(9.5, low=9, high=90), gpm=True) for number in range(cards)])
    environment = driver.environment(scenario)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "wellfed", "monitor", "--seconds", str(START_S + MONITOR_S + 5)]
    with subprocess.Popen(
        command, cwd=scratch, env={**os.environ, **paths, **environment}, stdout=subprocess.DEVNULL
    ) as process:
        watched, spent_s = psutil.Process(process.pid), []
        for pause_s in (START_S, MONITOR_S):
            time.sleep(pause_s)
            times = watched.cpu_times()
            spent_s.append(times.user + times.system)
        process.terminate()
    return (spent_s[1] - spent_s[0]) / MONITOR_S


def made_folder(logs: Path, steps: int) -> Path:
    """A run of so many steps."""
    folder = logs / f"recsys/runs/steps_{steps}"
    folder.mkdir(parents=True)
    rate = {**RATE, "steps": steps - 3}
    time_of = {"step_ms_p50": STEP_MS, "step_ms_p95": STEP_MS, "launch_ms_p50": 1.0}
    shares = {"wait_frac": 0.3, "copy_frac": 0.05, "compute_frac": 0.6, "host_frac": 0.05}
    made_run(
        folder,
        steps=steps,
        step_ms=STEP_MS,
        period_s=9.5,
        log_every=LOG_EVERY,
        throughput=rate,
        time={**shares, **time_of},
        readiness_frac=0.1,
        ceiling={"samples_per_s": 5000.0},
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", default="200,20000,1000000")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    raw: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as held:
        scratch, many = Path(held), Path(held) / "many"
        folders = {int(steps): made_folder(scratch / "logs", int(steps)) for steps in chosen.steps.split(",")}
        for number in range(NUM_RUNS):
            folder = many / f"logs/recsys/runs/2026-01-01_00-00-00_{number:04x}"
            folder.mkdir(parents=True)
            RunRecord(f"{number:04x}", workload="recsys", status="ok", started_at="2026-01-01T00:00:00+00:00").write(
                folder
            )
        driver = FakeDriver(Path(shutil.which("cc") or "cc"), scratch)
        for round_number in range(chosen.rounds):
            for steps, folder in folders.items():
                found = json.loads(python("-c", WRITE, str(folder), cwd=scratch))
                raw[f"reports of {steps} steps"].append(
                    {**found, "page_kib": (folder / "report.html").stat().st_size / 1024}
                )
            raw["no command: --help"].append({"total_s": elapsed_s("--help", cwd=scratch)})
            raw[f"runs, {NUM_RUNS} of them"].append({"total_s": elapsed_s("runs", cwd=many)})
            two = [str(folder) for folder in list(folders.values())[:2]]
            raw["report A B"].append({"total_s": elapsed_s("report", *two, cwd=scratch)})
            for cards in (1, 8):
                raw[f"monitor, {cards} GPUs"].append({"cpu_frac": monitor_cpu_frac(cards, scratch, driver)})
            print(
                f"round {round_number + 1} of {chosen.rounds}",
                {kind: found[-1] for kind, found in raw.items()},
                flush=True,
            )
    results = [
        {
            "what": kind,
            "n": len(found),
            **{f"{name}_mean": round(statistics.mean(one[name] for one in found), 4) for name in found[0]},
            **{
                f"{name}_sd": round(statistics.stdev(one[name] for one in found), 4)
                for name in found[0]
                if len(found) > 1
            },
        }
        for kind, found in raw.items()
    ]
    mean = {one["what"]: one for one in results}
    shown = ", ".join(f"{steps:,} steps {mean[f'reports of {steps} steps']['total_s_mean']:.2f} s" for steps in folders)
    record = {
        "theme": "seeing",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": f"python benchmarks/seeing.py --rounds {chosen.rounds} --steps {chosen.steps}",
        "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "config": {"step_ms": STEP_MS, "log_every_steps": LOG_EVERY, "interval_s": 0.5, "monitor_s": MONITOR_S,
                   "gpus": "the fake driver's, simulated"},
        "results": results,
        "raw": raw,
        "says": f"both reports, read, judged and drawn: {shown}; the monitor takes "
        f"{mean['monitor, 1 GPUs']['cpu_frac_mean']:.2%} of a core with one GPU and "
        f"{mean['monitor, 8 GPUs']['cpu_frac_mean']:.2%} with eight.",
    }  # fmt: skip
    print(record["says"])
    out = chosen.out or ROOT / "benchmarks" / "records" / f"{record['date']}_seeing_cpu.json"
    write_record(record, out)


if __name__ == "__main__":
    main()
