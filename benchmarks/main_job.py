"""How long is the main job, and what does it learn? ``python src/train.py`` with default options, one run a seed.

python benchmarks/main_job.py --out benchmarks/records/DATE_main_job_DEVICE.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import write_record

ROOT = Path(__file__).parents[1]


def run(seed: int) -> dict[str, Any]:
    """Figures of one run's record, and the seconds that the whole command took."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, str(ROOT / "src" / "train.py"), f"seed={seed}", f"hydra.run.dir={folder}"]
        began_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=scratch)
        seconds = time.perf_counter() - began_s
        record = json.loads((folder / "run.json").read_text())
        rows = (folder / "metrics.csv").read_text().splitlines()
    first = next(row.split(",")[5] for row in rows if ",val,ndcg_at_10," in row)
    kept = {name: record[name] for name in ("steps", "throughput", "ceiling", "readiness_frac", "time", "metrics")}
    return {
        "seed": seed,
        "seconds": seconds,
        "first_val_ndcg_at_10": float(first),
        **kept,
        "machine": record["machine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    runs = [run(seed) for seed in range(1, chosen.runs + 1)]
    machine = [one.pop("machine") for one in runs][-1]
    record = {
        "command": f"python benchmarks/main_job.py --runs {chosen.runs} --out RECORD",
        "seconds_median": statistics.median(one["seconds"] for one in runs),
        "samples_per_s_median": statistics.median(one["throughput"]["samples_per_s"] for one in runs),
        "share_of_ceiling_median": statistics.median(
            one["throughput"]["samples_per_s"] / one["ceiling"]["samples_per_s"] for one in runs
        ),
        "n": len(runs),
        "val_ndcg_at_10": [one["metrics"]["val/ndcg_at_10"] for one in runs],
        "seconds": [one["seconds"] for one in runs],
        "machine": machine,
    }
    print(json.dumps({key: value for key, value in record.items() if key != "machine"}, indent=1))
    if chosen.out:
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
