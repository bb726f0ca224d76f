"""What a trial of a sweep costs beside its steps, and what it would cost as a command of its own.

    python benchmarks/sweep.py --out benchmarks/records/<date>_sweep_cpu.json
    python benchmarks/sweep.py --wandb [--against TREE] --out benchmarks/records/<date>_sweep_wandb_cpu.json

With --wandb: what it takes to put a sweep of 12 trials into wandb, offline, in a process of its own; with --against in
this tree and in another checkout, in turns.

Without it: one sweep over trials that are all alike (an axis that changes nothing), with worker processes, in turns
with single runs of the same settings. Beside its steps: the whole trial less its steps and its ceiling's.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from write_record import write_record

from wellfed.observe.hardware.detect import machine
from wellfed.record import git_state
from wellfed.study import ledger

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "workload=recsys",
    "loader.backend=torch",
    "loader.num_workers=2",
    "workload.effective_batch_size=256",
    "logger=none",
)
STEPS = 50
SWEPT = (
    "workload=recsys",
    "loader=balanced",
    "workload.effective_batch_size=256",
    "sweep.trial_steps=20",
    "logger=none",
)
PUBLISH = """
import json, os, sys, time
from pathlib import Path
from wellfed.config.schema import LoggerConfig, LoggerMode
from wellfed.study import ledger
from wellfed.study.board.publish import publish
from wellfed.study.study_files import SweepFile
folder = Path(sys.argv[1])
rows = list(ledger.read(folder).latest().values())
began_s, used = time.perf_counter(), os.times()
publish(folder, SweepFile.read(folder), rows, LoggerConfig(mode=LoggerMode.offline), number_of_rows=len(rows))
cpu_s = sum(os.times()[:4]) - sum(used[:4])
print(json.dumps({"wall_s": time.perf_counter() - began_s, "cpu_s": cpu_s}))
"""


def command(script_words: Sequence[str], cwd: str) -> float:
    """Seconds of one command."""
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, *script_words], cwd=cwd, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - began_s


def steps_s(folder: Path) -> float:
    """Seconds of all steps of a run, and of those of its ceiling (three of warm-up beside the measured ones)."""
    found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    with (folder / "steps.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    trained_ms = sum(float(row[name] or 0) for row in rows for name in ("wait_ms", "copy_ms", "compute_ms", "host_ms"))
    config = found["config"]
    batches = config["telemetry"]["ceiling_steps"] + 3
    ceiling_s = batches * config["workload"]["effective_batch_size"] / found["ceiling"]["samples_per_s"]
    return trained_ms / 1e3 + ceiling_s


def sweep(axis: Sequence[int], cwd: str) -> list[float]:
    """Seconds beside the steps, of each trial of one sweep."""
    values = ",".join(map(str, axis))
    words = ["-m", "sweep=quick", "loader=baseline", *SETTINGS, f"trainer.log_every_steps={values}"]
    command([str(ROOT / "src" / "train.py"), *words, f"sweep.trial_steps={STEPS}", f"sweep.name=at_{axis[0]}"], cwd)
    folder = Path(cwd) / "logs" / "recsys" / "sweeps" / f"at_{axis[0]}"
    rows = [row for row in ledger.read(folder).rows if row.kind == "trial"]
    assert [row.status for row in rows] == ["ok"] * len(axis), rows
    return [row.seconds - steps_s(folder / row.folder) for row in rows]


def published(tree: Path, swept: Path) -> dict[str, float]:
    """Returns wall time and CPU time of putting a copy of a sweep into wandb, by the code of a checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sweep"
        shutil.copytree(swept, folder)
        environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "WANDB_SILENT": "true"}
        words = [sys.executable, "-c", PUBLISH, str(folder)]
        done = subprocess.run(words, cwd=scratch, env=environ, check=True, capture_output=True, text=True)
        runs = len(list(folder.rglob("offline-run-*/run-*.wandb")))
        assert runs == 13, runs
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures


def measure_wandb(rounds: int, against: Path | None) -> list[dict[str, Any]]:
    """Returns a row for each tree and figure."""
    trees = {"this tree": ROOT} | ({} if against is None else {"the other tree": against.resolve()})
    found: dict[str, list[dict[str, float]]] = {what: [] for what in trees}
    with tempfile.TemporaryDirectory() as cwd:
        axis = f"trainer.log_every_steps={','.join(map(str, range(1, 13)))}"
        command([str(ROOT / "src" / "train.py"), "-m", "sweep=quick", *SWEPT, axis], cwd)
        for number in range(rounds):
            for what, tree in list(trees.items())[:: 1 if number % 2 else -1]:
                found[what].append(published(tree, Path(cwd) / "logs" / "recsys" / "sweeps" / "quick"))
    return [
        {"tree": what, "figure": figure, "n": len(all_)} | _spread([each[figure] for each in all_])
        for what, all_ in found.items()
        for figure in ("wall_s", "cpu_s")
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median_s": median(values), "least_s": min(values), "most_s": max(values)}


def main() -> None:
    """Prints the figures; writes the record where told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=4, help="in each round's sweep")
    parser.add_argument("--wandb", action="store_true", help="measure putting a sweep into wandb")
    parser.add_argument("--against", type=Path, help="another checkout, for --wandb")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if chosen.wandb:
        _main_wandb(chosen)
        return
    imports, singles, trials = [], [], []
    with tempfile.TemporaryDirectory() as cwd:
        for number in range(chosen.rounds):
            imports.append(command(["-c", "import wellfed.run.stages"], cwd))
            words = [*SETTINGS, f"trainer.max_steps={STEPS + 3}", f"hydra.run.dir=single_{number}"]
            whole_s = command([str(ROOT / "src" / "train.py"), *words], cwd)
            singles.append(whole_s - steps_s(Path(cwd) / f"single_{number}"))
            trials += sweep(range(100 * (number + 1), 100 * (number + 1) + chosen.trials), cwd)
    results = [
        {"what": what, "n": len(values), "median_s": median(values), "mean_s": fmean(values), "sd_s": stdev(values)}
        for what, values in (
            ("a trial beside its steps", trials),
            ("a command of its own beside its steps", singles),
            ("importing what a run needs", imports),
        )
    ]
    for row in results:
        print(f"{row['what']:<40} n={row['n']:<3} median {row['median_s']:.3f} s, sd {row['sd_s']:.3f}")
    says = (
        f"A trial takes {median(trials):.2f} s beside its steps (median of {len(trials)}), "
        f"{median(trials) / median(imports):.2f} of the time that importing takes, and "
        f"{median(trials) / median(singles):.3f} of what a command of its own takes beside its steps."
    )
    print(says)
    if chosen.out:
        record: dict[str, Any] = {
            "theme": "sweep",
            "date": datetime.now(UTC).date().isoformat(),
            "command": f"python benchmarks/sweep.py --rounds {chosen.rounds} --trials {chosen.trials} --out RECORD",
            "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
            "machine": {"load": os.getloadavg(), **machine().to_dict()},
            "config": {"settings": SETTINGS, "steps": STEPS, "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]},
            "results": results,
            "raw": {"trials_s": trials, "singles_s": singles, "imports_s": imports},
            "says": says,
        }
        write_record(record, chosen.out)


def _main_wandb(chosen: argparse.Namespace) -> None:
    load_before = os.getloadavg()
    results = measure_wandb(chosen.rounds, chosen.against)
    figures = [f"{row['tree']} {row['figure'].partition('_')[0]} {row['median_s']:.1f} s" for row in results]
    says = f"Putting a sweep of 12 trials into wandb, offline (median of {chosen.rounds}): {', '.join(figures)}."
    print(says)
    if chosen.out:
        record: dict[str, Any] = {
            "theme": "sweep",
            "date": datetime.now(UTC).date().isoformat(),
            "command": f"python benchmarks/sweep.py --wandb --rounds {chosen.rounds} --against TREE --out RECORD",
            "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
            "machine": {"load": os.getloadavg(), "load_before": load_before, **machine().to_dict()},
            "config": {"settings": SWEPT, "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]},
            "results": results,
            "says": says,
        }
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
