"""How long should OpenMP's threads spin on a CPU? Samples/s of the main job, alone and beside busy neighbours.

    python benchmarks/omp_spin.py --out benchmarks/records/DATE_omp_spin_DEVICE.json

Variants take turns in each round; ratios are to libgomp's own default (300,000 turns where there are no more threads
than cores) in the same round. A neighbour is a process that never rests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import write_record

ROOT = Path(__file__).parents[1]
VARIANTS = {
    "libgomp's 300000": {"GOMP_SPINCOUNT": "300000"},
    "ours": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
REFERENCE = "libgomp's 300000"
CLEARED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def rate(variables: dict[str, str], steps: int) -> float:
    """Samples/s of one run of the command."""
    environment = {key: value for key, value in os.environ.items() if key not in CLEARED} | variables
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [
            sys.executable,
            str(ROOT / "src" / "train.py"),
            f"hydra.run.dir={folder}",
            f"trainer.max_steps={steps}",
        ]
        quiet = ["logger=none", "telemetry=none"]
        subprocess.run([*command, *quiet], check=True, stdout=subprocess.DEVNULL, env=environment)
        return float(json.loads((folder / "run.json").read_text())["throughput"]["samples_per_s"])


def rounds(num_rounds: int, num_neighbours: int, steps: int) -> dict[str, list[float]]:
    """Rates by variant, beside processes that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_neighbours)]
    try:
        found: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(num_rounds):
            for name, variables in VARIANTS.items():
                found[name].append(rate(variables, steps))
                print(num_neighbours, name, round(found[name][-1]), flush=True)
        return found
    finally:
        for process in busy:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    record = {
        "command": "python benchmarks/omp_spin.py --out RECORD",
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
    }
    record["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    record["samples_per_s"], record["median_ratio_to_libgomps"] = {}, {}
    for neighbours in (0, 2):
        found = rounds(chosen.rounds, neighbours, chosen.steps)
        key = f"{neighbours} busy neighbours"
        record["samples_per_s"][key] = found
        record["median_ratio_to_libgomps"][key] = {
            name: statistics.median(a / b for a, b in zip(rates, found[REFERENCE], strict=True))
            for name, rates in found.items()
        }
    print(json.dumps(record["median_ratio_to_libgomps"], indent=1))
    if chosen.out:
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
