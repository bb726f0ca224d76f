"""What a trial of a sweep costs beside its steps, and what it would cost as a command of its own.

    python benchmarks/sweep.py --out benchmarks/records/<date>_sweep_cpu.json
    python benchmarks/sweep.py --whole [--against TREE] --out benchmarks/records/<date>_whole_sweep_cpu.json

With --whole: commands of a sweep with 12 trials of 20 steps and the confirmations, without a logger and with wandb
offline, in turns; with --against in this tree and in another checkout.

Without it: one sweep over trials that are all alike (an axis that changes nothing), with worker processes, in turns
with single runs of the same settings. Beside its steps: the whole trial less its steps and its ceiling's.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
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
WHOLE = ("workload=recsys", "loader=balanced", "workload.effective_batch_size=256", "sweep.trial_steps=20")


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


def whole_sweep(tree: Path, logger: str, number: int, cwd: str) -> dict[str, float]:
    """Returns wall time and CPU time of one sweep, the time after its last trial, and its steps' and ceilings' time."""
    name = f"{tree.name}_{logger}_{number}"
    words = [
        *WHOLE,
        f"logger={logger}",
        f"sweep.name={name}",
        f"trainer.log_every_steps={','.join(map(str, range(1, 13)))}",
    ]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "WANDB_MODE": "offline"}
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(tree / "src" / "train.py"), "-m", "sweep=quick", *words],
        cwd=cwd,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    wall_s, ended_at_s = time.perf_counter() - began_s, time.time()
    process.returncode = os.waitstatus_to_exitcode(status)
    folder = Path(cwd) / "logs" / "recsys" / "sweeps" / name
    rows = ledger.read(folder).rows
    assert process.returncode == 0
    assert [row.status for row in rows] == ["ok"] * 21, rows
    runs = len(list(folder.rglob("offline-run-*/run-*.wandb")))
    assert runs == (13 if logger == "wandb" else 0), runs
    last_s = (folder / "ledger.jsonl").stat().st_mtime
    beside = [row.seconds - steps_s(folder / row.folder) for row in rows]
    return {
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "after_last_trial_s": ended_at_s - last_s,
        "a_trial_beside_steps_s": median(beside),
    }


def measure_whole(rounds: int, loggers: Sequence[str], against: Path | None) -> list[dict[str, Any]]:
    """Returns a row for each tree, logger and figure: the medians of all rounds."""
    trees = {"this tree": ROOT} | ({} if against is None else {"the other tree": against.resolve()})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as cwd:
        for number in range(rounds):
            for logger in loggers:
                for what, tree in list(trees.items())[:: 1 if number % 2 else -1]:
                    found.setdefault((what, logger), []).append(whole_sweep(tree, logger, number, cwd))
    return [
        {"tree": what, "logger": logger, "figure": figure, "n": len(all_)} | _spread([each[figure] for each in all_])
        for (what, logger), all_ in sorted(found.items())
        for figure in all_[0]
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median_s": median(values), "least_s": min(values), "most_s": max(values)}


def main() -> None:
    """Prints the figures; writes the record where told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=4, help="in each round's sweep")
    parser.add_argument("--whole", action="store_true", help="whole commands of a sweep, with and without wandb")
    parser.add_argument("--loggers", nargs="+", default=["none", "wandb"], help="for --whole")
    parser.add_argument("--against", type=Path, help="another checkout, for --whole")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if chosen.whole:
        _main_whole(chosen)
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


def _main_whole(chosen: argparse.Namespace) -> None:
    load_before = os.getloadavg()
    results = measure_whole(chosen.rounds, chosen.loggers, chosen.against)
    for row in results:
        print(f"{row['tree']:<15} {row['logger']:<6} {row['figure']:<24} n={row['n']} median {row['median_s']:.2f} s")
    says = "; ".join(
        f"{row['tree']}, logger={row['logger']}: {row['figure']} {row['median_s']:.2f} s"
        for row in results
        if row["figure"] != "wall_s"
    )
    print(says)
    if chosen.out:
        record: dict[str, Any] = {
            "theme": "sweep",
            "date": datetime.now(UTC).date().isoformat(),
            "command": " ".join(["python benchmarks/sweep.py", *sys.argv[1:]]),
            "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
            "machine": {"load": os.getloadavg(), "load_before": load_before, **machine().to_dict()},
            "config": {"settings": WHOLE, "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]},
            "results": results,
            "says": says,
        }
        write_record(record, chosen.out)


if __name__ == "__main__":
    main()
