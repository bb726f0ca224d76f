"""How long from ``git clone`` to the first optimizer step of ``make train``, and what takes it.

    python benchmarks/first_step.py [--runs 5] [--date 2026-11-22]

Each round clones this repository twice into a temporary folder and trains there, in turns: once as ``make train``
installs (what a run needs), once after ``make install`` (what tests need besides). pip's cache of downloads is as it
is on this machine: with an empty one the download of PyTorch comes on top.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PARTS = ("clone", "install", "start_to_first_step", "total")


def timed(*command: str, cwd: Path) -> float:
    """Seconds of one command, which must succeed."""
    began_at_s = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "WANDB_MODE": "offline"})
    return time.perf_counter() - began_at_s


def first_step(target: str) -> dict[str, float]:
    """Seconds of each part of a fresh clone's way to its first step, where ``target`` of make has installed."""
    with tempfile.TemporaryDirectory() as scratch:
        clone_s = timed("git", "clone", "--quiet", str(REPO), "fresh", cwd=Path(scratch))
        fresh = Path(scratch) / "fresh"
        install_s = timed("make", target, f"PYTHON={sys.executable}", cwd=fresh)
        train_s = timed("make", "train", "ARGS=trainer.max_steps=2", cwd=fresh)
        (folder,) = (fresh / "logs/recsys/runs").iterdir()
        with (folder / "steps.csv").open() as rows:
            first_at_s = float(next(csv.DictReader(rows))["time_s"])
        # The record's clock begins when the run's folder is made; what came before it is what is left of the process.
        to_first_s = train_s - json.loads((folder / "run.json").read_text())["duration_s"] + first_at_s
    return dict(zip(PARTS, (clone_s, install_s, to_first_s, clone_s + install_s + to_first_s), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--date", default=f"{datetime.now(UTC):%Y-%m-%d}")
    chosen = parser.parse_args()
    raw: dict[str, list[dict[str, float]]] = {".venv/.installed": [], "install": []}
    for _ in range(chosen.runs):
        for target, found in raw.items():
            found.append(first_step(target))
            print(target, {part: round(seconds, 1) for part, seconds in found[-1].items()}, flush=True)
    results = [
        {
            "installed_by": "make train" if target != "install" else "make install",
            "n": len(found),
            **{f"{part}_s_mean": round(statistics.mean(one[part] for one in found), 2) for part in PARTS},
            **{f"{part}_s_sd": round(statistics.stdev(one[part] for one in found), 2) for part in PARTS},
        }
        for target, found in raw.items()
    ]
    ratio = results[0]["total_s_mean"] / results[1]["total_s_mean"]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, check=True)
    record = {
        "theme": "first_step",
        "date": chosen.date,
        "command": f"python benchmarks/first_step.py --runs {chosen.runs}",
        "git": commit.stdout.decode().strip(),
        "machine": {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))},
        "config": {"pip_cache": "as the machine has it", "trainer.max_steps": 2},
        "results": results,
        "raw": raw,
        "says": f"from clone to first step {results[0]['total_s_mean']:.0f} s, of which installing takes "
        f"{results[0]['install_s_mean']:.0f} s; {ratio:.2f} of what it takes with the tools of the tests installed.",
    }
    out = REPO / "benchmarks" / "records" / f"{chosen.date}_first_step_cpu.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(record["says"])


if __name__ == "__main__":
    main()
