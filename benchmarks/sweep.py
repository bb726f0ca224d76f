"""Measures the cost of a sweep's trial beside its steps, and of a command of its own.

    python benchmarks/sweep.py --out benchmarks/records/<date>_sweep_cpu.json
    python benchmarks/sweep.py --whole [--rounds 5] [--out RECORD]

One sweep over trials that are all alike (an axis that changes nothing), with worker processes, in turns with single
runs of the same settings. Beside its steps: the whole trial less its steps and its ceiling's.

With --whole: whole commands of 12 trials of 20 steps, a sweep put into wandb (offline) and a search, in turns with a
search by Optuna in one process (`by_hand.py`), if it is installed. Also their seconds beside the steps of the trials,
and for the sweep beside the runs that confirm the best. The same of a single trial is the median of a command's trials,
by its rows: starting the command is not in it, validation and test of a search's trial are. Steps include those of
the ceiling, which a trial measures.
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
from pathlib import Path
from statistics import fmean, median, stdev

from measuring import alone, compared, finish, has, turned

from wellfed.study.rows import read_rows

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "workload=recsys",
    "loader.backend=torch",
    "loader.num_workers=2",
    "workload.effective_batch_size=256",
    "logger=none",
)
STEPS = 50
WHOLE = ("workload=recsys", "workload.model.text=none", "workload.effective_batch_size=256")
TRIALS, TRIAL_STEPS = 12, 20
COMMANDS = {
    "sweep": ["src/train.py", "-m", "sweep=quick", "loader=baseline", *WHOLE, f"sweep.trial_steps={TRIAL_STEPS}",
              "logger.mode=offline", f"trainer.log_every_steps={','.join(map(str, range(1, TRIALS + 1)))}"],
    "search": ["src/train.py", "-m", "search=optuna", *WHOLE, f"trainer.max_steps={TRIAL_STEPS}", "logger=none",
               f"search.max_trials={TRIALS}", "workload.optimizer.lr=interval(1e-3,1e-1)"],
    "Optuna": ["benchmarks/by_hand.py", "optuna", "--trials", str(TRIALS), "--steps", str(TRIAL_STEPS)],
    "Optuna, ranking": ["benchmarks/by_hand.py", "optuna", "--trials", str(TRIALS), "--steps", str(TRIAL_STEPS),
                        "--evaluates"],
}  # fmt: skip
"""Whole commands, by name; a search of ours validates and tests each trial, a sweep only times steps."""

BESIDE, OF_A_TRIAL = "{} beside its steps", "{}, a trial beside its steps"


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
    rows = [row for row in read_rows(folder).rows if row.kind == "trial"]
    assert [row.status for row in rows] == ["ok"] * len(axis), rows
    return [row.seconds - steps_s(folder / row.folder) for row in rows]


def trials_s(folder: Path) -> tuple[float, float]:
    """Seconds of the steps of a study's trials and of the whole runs that confirm them, and of a trial beside its
    steps (the median)."""
    rows = read_rows(folder).rows
    assert {row.status for row in rows} == {"ok"}, rows
    of_steps = {row.folder: steps_s(folder / row.folder) for row in rows if row.kind == "trial"}
    confirming_s = sum(row.seconds for row in rows if row.folder not in of_steps)
    beside = [row.seconds - of_steps[row.folder] for row in rows if row.folder in of_steps]
    return sum(of_steps.values()) + confirming_s, median(beside)


def whole(rounds: int) -> dict[str, list[float]]:
    """Seconds of each of `COMMANDS` that can run here, of a study and of a trial beside their steps, one a round."""
    names = [name for name in COMMANDS if has("optuna") or name == "sweep"]
    beside = [title.format(name) for title in (BESIDE, OF_A_TRIAL) for name in names[:2]]
    found: dict[str, list[float]] = {name: [] for name in (*names, *beside)}
    for number in range(rounds):
        for name in turned(names, number):
            with tempfile.TemporaryDirectory() as cwd:
                script, *words = COMMANDS[name]
                found[name].append(command([str(ROOT / script), *words], cwd))
                if BESIDE.format(name) in found:
                    of_steps_s, of_a_trial_s = trials_s(next(Path(cwd).glob("logs/recsys/*/*")))
                    found[BESIDE.format(name)].append(found[name][-1] - of_steps_s)
                    found[OF_A_TRIAL.format(name)].append(of_a_trial_s)
        print(number, {name: round(seconds[-1], 2) for name, seconds in found.items()}, flush=True)
    return found


def main() -> None:
    """Prints the figures; writes the record where told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=4, help="in each round's sweep")
    parser.add_argument("--whole", action="store_true", help="whole commands beside Optuna in one process")
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
    finish("sweep", results, says, chosen.out, config={"settings": SETTINGS, "steps": STEPS})


def _main_whole(chosen: argparse.Namespace) -> None:
    found = whole(chosen.rounds)
    rows = []
    for name, peer, what in (("sweep", "Optuna", "a sweep"), ("search", "Optuna, ranking", "a search")):
        if name in found:
            title = f"{what} of {TRIALS} trials of {TRIAL_STEPS} steps"
            peers = {"Optuna in one process": found.get(peer)}
            rows += compared(title, "s", found[name], peers, less_is_better=True)
            rows.append(alone(f"{title}, beside steps and ceiling", "s", found[BESIDE.format(name)]))
            rows.append(alone(f"a trial of {what}, beside its steps and ceiling", "s", found[OF_A_TRIAL.format(name)]))
    results = [{"what": name, "n": len(seconds), "median_s": median(seconds)} for name, seconds in found.items()]
    says = ", ".join(f"{row['what']} {row['median_s']:.1f} s" for row in results)
    finish("sweep_whole", results, f"Whole commands: {says}.", chosen.out, config=COMMANDS, compared=rows)


if __name__ == "__main__":
    main()
