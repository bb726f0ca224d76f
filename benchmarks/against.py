"""Compares this commit with an earlier one: runs the other benchmarks in both trees, in turns.

    python benchmarks/against.py COMMIT [--rounds 5] [--only loop loader handover] [--out RECORD]

Both commits are cloned into a temporary folder. A round runs each benchmark once in either clone, in another order each
time; a ratio is of one round, this commit over the earlier one, so that below 1 is faster. Packages are those of the
Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measuring import finish, mean_ratio

REPO = Path(__file__).resolve().parents[1]
Figures = Mapping[str, float]


def _of_loop(results: list[dict[str, Any]]) -> Figures:
    return {"loop: step of a small network over plain PyTorch": _one(results, loop="ours")["x_raw_median"]}


def _of_startup(results: list[dict[str, Any]]) -> Figures:
    return {f"startup: CPU time of {each['case']}": each["wellfed"]["cpu_s_mean"] for each in results}


def _of_sweep(results: list[dict[str, Any]]) -> Figures:
    return {"sweep: a trial beside its steps": _one(results, what="a trial beside its steps")["median_s"]}


def _of_loader(results: list[dict[str, Any]]) -> Figures:
    ours = [each for each in results if "ratio_to_limit_median" in each]
    return {
        f"loader: batch of {each['batch']}, {each['variant']}, limit over ours": 1 / each["ratio_to_limit_median"]
        for each in ours
    }


def _of_shards(results: list[dict[str, Any]]) -> Figures:
    ours = [each for each in results if each["variant"].startswith("loader, ")]
    return {f"shards: {each['variant']}, raw read over ours": 1 / each["ratio_to_raw_median"] for each in ours}


def _of_handover(results: list[dict[str, Any]]) -> Figures:
    return {f"handover: CPU time of a batch of {each['batch']}": each["handover_cpu_ms_median"] for each in results}


def _one(results: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    return next(each for each in results if wanted.items() <= each.items())


BENCHMARKS: Mapping[str, tuple[list[str], Callable[[list[dict[str, Any]]], Figures]]] = {
    "loop": (["--rounds", "3", "--steps", "1000"], _of_loop),
    "startup": (["--runs", "5"], _of_startup),
    "sweep": (["--rounds", "2", "--trials", "3"], _of_sweep),
    "loader": (["--rounds", "5"], _of_loader),
    "shard_reading": (["--rounds", "3", "--clips", "4000"], _of_shards),
    "handover": (["--rounds", "3"], _of_handover),
}
"""Name -> arguments, and what is compared of its results; less is better."""


def git(*arguments: str) -> str:
    """Returns the output of a git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=True).stdout.decode().strip()


def measure(tree: Path, name: str) -> Figures:
    """Runs a benchmark in a tree and returns its figures."""
    arguments, figures = BENCHMARKS[name]
    out = tree / "out.json"
    where = ["--date", "against"] if name == "startup" else ["--out", str(out)]
    command = [sys.executable, f"benchmarks/{name}.py", *arguments, *where]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {tree} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    if name == "startup":
        (out,) = (tree / "benchmarks" / "records").glob("against_startup_*.json")
    return figures(json.loads(out.read_text())["results"])


def summary(name: str, ratios: list[float]) -> dict[str, Any]:
    """Returns the geometric mean of ratios with its 95 % interval."""
    mean, ci95 = mean_ratio(ratios)
    return {
        "figure": name,
        "n": len(ratios),
        "ratio_mean": round(mean, 4),
        "ratio_ci95": [round(bound, 4) for bound in ci95],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    found: dict[str, list[tuple[float, float]]] = {}
    commits = {"before": git("rev-parse", chosen.commit), "after": git("rev-parse", "HEAD")}
    with tempfile.TemporaryDirectory() as scratch:
        trees = {}
        for which, commit in commits.items():
            trees[which] = Path(scratch) / which
            git("clone", "-q", str(REPO), str(trees[which]))
            git("-C", str(trees[which]), "checkout", "-q", commit)
        for number in range(chosen.rounds):
            for name in chosen.only:
                order = random.Random(number).sample(list(trees), 2)
                figures = {which: measure(trees[which], name) for which in order}
                for figure in figures["before"].keys() & figures["after"].keys():
                    found.setdefault(figure, []).append((figures["before"][figure], figures["after"][figure]))
            print(f"round {number + 1} of {chosen.rounds}", flush=True)
    results = [summary(name, [after / before for before, after in pairs]) for name, pairs in sorted(found.items())]
    for each in results:
        low, high = each["ratio_ci95"]
        print(f"{each['ratio_mean']:.3f} ({low:.3f} to {high:.3f}) {each['figure']}")
    slower = [each["figure"] for each in results if each["ratio_ci95"][0] > 1]
    says = f"slower than {chosen.commit} beyond noise: {', '.join(slower) or 'nothing'}"
    config = {name: BENCHMARKS[name][0] for name in chosen.only}
    finish("against", results, says, chosen.out, config=config)


if __name__ == "__main__":
    main()
