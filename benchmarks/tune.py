"""Does tune find what the full grid finds, and in which part of its time? Runs both, then their results in turn.

    python benchmarks/tune.py --list
    python benchmarks/tune.py --only recsys/cpu --folder logs/tune_benchmark
    python benchmarks/tune.py --folder logs/tune_benchmark --out benchmarks/records/<date>_tune_cpu.json

A case is a workload, a device and a start: a loader and a memory as people begin with. For each workload and device
``python src/train.py -m sweep=full`` runs all points of the grid once; for each start ``python src/tune.py`` searches
from there. What tune ends with and the best of the grid's leaderboard are then measured again, in turn, as the points
of one sweep, each of them first in every other round. Trial time is that of the trials alone: of the grid without
measuring its best again, of tune without its own comparison, which is told beside it (``tune_comparison_s``). Compiling
is left out with ``--no-compile``, and on a simulated card, which compiles nothing.
What is in the folder is not run again: the same command goes on, and a record can be made of pieces.
``simulated`` is a simulated card behind real loaders (tests/fake_cuda): its figures are of no real GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

from before_after import GUIDES, card_of  # noqa: E402
from before_after import machine as device  # noqa: E402

from benchmarks.measuring import finish  # noqa: E402
from wellfed.study.objective import SAMPLES_PER_S  # noqa: E402
from wellfed.study.ranking.ranking import leaderboard  # noqa: E402
from wellfed.study.rows import read_rows  # noqa: E402
from wellfed.study.study_files import SweepFile  # noqa: E402
from wellfed.study.tune.trial import with_overrides  # noqa: E402
from wellfed.study.tune_gain import gain_in_turns  # noqa: E402

LEAST_OF_BEST, MOST_OF_TIME = 0.95, 0.3
"""Minimum share of the grid's best rate, and maximum share of its trial time, for tune."""
COMPILE = "gpu.compile"
BASELINE = ("loader=baseline", "memory=dynamic")
STARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "recsys": {"guide": ("loader=baseline", "memory=cache")},
    "forecast": {"guide": (*BASELINE, "loader.num_workers=4", "loader.prefetch_factor=2", "loader.pin_memory=true")},
    "restoration": {"guide": BASELINE},
    "hyperspectral": {"guide": (*BASELINE, "loader.num_workers=8", "loader.prefetch_factor=1")},
    "speech": {"guide": (*BASELINE, "loader.num_workers=8", "loader.prefetch_factor=2", "loader.pin_memory=true")},
}
"""Loader and memory of ``experiment=<workload>_starved`` by workload, without what changes learning."""
COMMON_STARTS = {
    "split": ("loader=aggressive", "memory=accumulate"),
    "baseline": BASELINE,
    "default": ("loader=auto", "memory=auto"),
}
TIMEOUT_S = 7200


@dataclass(frozen=True)
class Case:
    """Start and device of a case."""

    workload: str
    where: str
    start: str

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.where}/{self.start}"

    @property
    def words(self) -> tuple[str, ...]:
        """Overrides of the start."""
        return {**COMMON_STARTS, **STARTS[self.workload]}[self.start]


CASES = [
    Case(workload, where, start)
    for workload in STARTS
    for where in ("cpu", "simulated")
    for start in dict.fromkeys((*STARTS[workload], *COMMON_STARTS))
    if (workload, start) not in (("restoration", "baseline"),)  # its guide's
]


@dataclass(frozen=True)
class Bench:
    """Types the commands of a case; what they leave is not made again."""

    case: Case
    folder: Path
    environment: Mapping[str, str]
    steps: int
    compiles: bool

    def grid(self) -> Path:
        """All points of the full grid; the folder of the sweep."""
        name = f"grid_{self.case.where}"
        self._type("train.py", "-m", "sweep=full", f"sweep.name={name}")
        return self._logs / "sweeps" / name

    def tune(self) -> Path:
        """Runs a search from the start, and returns its folder."""
        name = f"{self.case.where}_{self.case.start}"
        self._type("tune.py", *self.case.words, f"tune.name={name}", "tune.rounds=3", "tune.write=never")
        return self._logs / "tunes" / name

    def in_turns(self, found: Sequence[str], best: Sequence[str], rounds: int) -> tuple[list[float | None], ...]:
        """Rates of both, one a round, as points of a sweep; every other round begins with the grid's."""
        name = f"turns_{self.case.where}_{self.case.start}"
        options, prefix = self.folder / "options", f"{self.case.workload}_{name}"
        pairs = [(f"{prefix}_{number}_tuned", f"{prefix}_{number}_grid") for number in range(rounds)]
        for both in pairs:
            for option, words in zip(both, (found, best), strict=True):
                write_experiment(options, option, words)
        order = [option for number, both in enumerate(pairs) for option in (both if number % 2 == 0 else both[::-1])]
        words = ("sweep=quick", f"sweep.name={name}", "~hydra.sweeper.params.loader")
        self._type("train.py", "-m", "--config-dir", str(options), *words, f"experiment={','.join(order)}")
        rows = read_rows(self._logs / "sweeps" / name).rows
        rates = {word: SAMPLES_PER_S(row) for row in rows if row.kind == "trial" for word in row.overrides}
        return tuple([rates.get(f"experiment={both[place]}") for both in pairs] for place in (0, 1))

    @property
    def _logs(self) -> Path:
        return self.folder / "logs" / self.case.workload

    def _type(self, script: str, *words: str) -> None:
        is_cpu = self.case.where == "cpu"
        shared = (
            *(f"workload={self.case.workload}", "telemetry=default", "logger=none"),
            *(f"trainer.accelerator={'cpu' if is_cpu else 'gpu'}", f"sweep.trial_steps={self.steps}"),
            *(f"paths.log_dir={self.folder}/logs", f"paths.cache_dir={self.folder}/cache"),
            *(() if is_cpu else GUIDES[self.case.workload].start),
            *(() if self.compiles else (f"{COMPILE}=none",)),
        )
        typed = [str(ROOT / "src" / script), *words, *shared]
        done = subprocess.run(
            [sys.executable, *typed],
            env=dict(self.environment),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            told = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
            raise SystemExit(f"{' '.join(typed)}\nended with {done.returncode}:\n{told}")


def write_experiment(folder: Path, name: str, words: Sequence[str]) -> None:
    """Options and knobs as an option of ``experiment``."""
    choices, knobs = [], []
    for word in words:
        key, _, value = word.partition("=")
        if "." not in key:
            choices.append(f"  - override /{key}: {value}\n")
        else:
            group, _, knob = key.partition(".")
            knobs.append((group, f"  {knob}: {value}\n"))
    lines = ["# @package _global_\n", *(["defaults:\n", *choices] if choices else [])]
    for group in dict.fromkeys(group for group, _ in knobs):
        lines += [f"{group}:\n", *(line for own, line in knobs if own == group)]
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def measured(bench: Bench, rounds: int) -> dict[str, Any]:
    """Runs a whole case."""
    case, swept, tuned = bench.case, bench.grid(), bench.tune()
    found = json.loads((tuned / "tune.json").read_text(encoding="utf-8"))
    rows = read_rows(swept)
    board = leaderboard(SweepFile.read(swept), rows)
    best = board.ranked[0]
    words = with_overrides(case.words, found["result"])
    grid_words = [f"{axis}={value}" for axis, value in best.values.items()]
    mine, its = bench.in_turns(words, grid_words, rounds)
    gain = gain_in_turns(its, mine)
    assert gain is not None, f"{case.name}: no round gave both rates"
    trials = [row for row in rows.rows if row.kind == "trial"]
    grid_s = sum(row.seconds for row in trials)
    start = found["steps"][0]["after"]
    return {
        "case": case.name,
        "start": list(case.words),
        "tuned": list(words),
        "best_of_grid": grid_words,
        "start_per_s": start,
        "tuned_per_s": median(rate for rate in mine if rate),
        "grid_per_s": median(rate for rate in its if rate),
        "of_best": gain.factor,
        "of_best_ci95": gain.ci95,
        "n": gain.rounds,
        "tune_trials": len(found["steps"]),
        "grid_trials": len(trials),
        "tune_trial_s": found["trial_seconds"],
        "grid_trial_s": grid_s,
        "tune_comparison_s": 0.0 if found["comparison"] is None else found["comparison"]["seconds"],
        "of_time": found["trial_seconds"] / grid_s,
        "ended_because": found["ended_because"],
        "steps": [
            {key: step[key] for key in ("turned", "finding", "status", "before", "after", "gain", "is_kept", "seconds")}
            for step in found["steps"]
        ],
        "grid": {
            " ".join(f"{key}={value}" for key, value in each.values.items()): each.score for each in board.entries
        },
        "rounds": {"tuned_per_s": mine, "grid_per_s": its},
    }


def is_met(row: Mapping[str, Any]) -> bool:
    """Returns whether tune kept both limits."""
    return bool(row["of_best"] >= LEAST_OF_BEST and row["of_time"] <= MOST_OF_TIME)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each case."""
    form = "{:<32} {:>10} {:>10} {:>10} {:>16} {:>7} {:>13}"
    yield form.format("case", "start/s", "tuned/s", "grid/s", "of the best", "trials", "of its time")
    for row in rows:
        low, high = row["of_best_ci95"] or (float("nan"), float("nan"))
        rates = (f"{row[key]:,.0f}" for key in ("start_per_s", "tuned_per_s", "grid_per_s"))
        of_best = f"{row['of_best']:.2f} ({low:.2f}-{high:.2f})"
        trials = f"{row['tune_trials']}/{row['grid_trials']}"
        shown = form.format(row["case"], *rates, of_best, trials, f"{row['of_time']:.2f}")
        yield shown if is_met(row) else f"{shown}   short of what is asked"


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    met = sum(map(is_met, rows))
    places = sorted({row["case"].split("/")[1] for row in rows})
    on = " and ".join({"cpu": "this CPU", "simulated": "a simulated card", "gpu": "a GPU"}[place] for place in places)
    return (
        f"On {on} tune reaches {LEAST_OF_BEST} of the full grid's best rate in {MOST_OF_TIME} of its trial time or "
        f"less in {met} of {len(rows)} cases: {median(row['of_best'] for row in rows):.2f} of the rate in "
        f"{median(row['of_time'] for row in rows):.2f} of the time (medians), without its own comparison of start and "
        f"result, which took {median(row['tune_comparison_s'] / row['grid_trial_s'] for row in rows):.2f} more."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the cases, and run none")
    parser.add_argument("--only", default="", help="cases whose name holds one of these, e.g. recsys/cpu,speech")
    parser.add_argument("--steps", type=int, default=200, help="of each trial at most (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="of both results in turn (default 5)")
    parser.add_argument("--no-compile", action="store_true", help="leave gpu.compile out of grid and search")
    parser.add_argument("--folder", type=Path, default=Path("logs/tune_benchmark"), help="where all of it goes")
    parser.add_argument("--out", type=Path, help="file of the record")
    asked = parser.parse_args()
    wanted = asked.only.split(",")
    cases = [case for case in CASES if any(part in case.name for part in wanted)]
    if asked.list or not cases:
        print("\n".join(f"{case.name:<32} {' '.join(case.words)}" for case in (cases or CASES)))
        return
    folder = asked.folder.resolve()
    rows = []
    for case in cases:
        row = one_case(case, folder, asked)
        rows.append(row)
        print("\n".join(table([row])), flush=True)
    print("\n".join(["", *table(rows)]))
    is_simulated = any(case.where == "simulated" for case in cases)
    config = {
        "trial_steps": asked.steps,
        "rounds": asked.rounds,
        "compiles": not asked.no_compile,
        "is_simulated": is_simulated,
        "cards": {
            name: card_of(GUIDES[name].card_share, GUIDES[name].kernel_share)
            for name in dict.fromkeys(case.workload for case in cases if case.where == "simulated")
        },
        "asked": {"of_best": LEAST_OF_BEST, "of_time": MOST_OF_TIME},
    }
    results = [{key: value for key, value in row.items() if key not in ("grid", "rounds")} for row in rows]
    finish("tune", results, in_words(rows), asked.out, config=config)


def one_case(case: Case, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the stored result of a case, or runs it."""
    known = folder / "cases" / f"{case.name.replace('/', '_')}.json"
    if known.exists():
        found: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
        return found
    place = folder / f"{case.workload}_{case.where}"
    place.mkdir(parents=True, exist_ok=True)
    compiles = case.where != "simulated" and not asked.no_compile
    with device(
        case.where, card_of(GUIDES[case.workload].card_share, GUIDES[case.workload].kernel_share), place
    ) as variables:
        row = measured(Bench(case, folder, {**os.environ, **variables}, asked.steps, compiles), asked.rounds)
    known.parent.mkdir(exist_ok=True)
    known.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return row


if __name__ == "__main__":
    main()
