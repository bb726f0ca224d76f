"""Does the recommender learn? Popularity, tuned BPR matrix factorisation and the default options, same users.

    python benchmarks/fetch_ml100k.py FOLDER
    python benchmarks/recsys_learning.py --data FOLDER --out benchmarks/records/DATE_recsys_learning_DEVICE.json

Every training is ``python src/train.py`` as a user types it; the factorisation adds ``workload.model.text=none`` and is
tuned on validation over `GRID`. Leave-last-out by time, ranking of the whole catalogue, NDCG@10 of the test item with
the weights that were best on validation. Differences come with a paired bootstrap over users.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from wellfed.contract import Datasets
from wellfed.sample_rng import SampleRng
from workloads.recsys.data import datasets
from workloads.recsys.evaluation import metrics_of_ranks, popularity_ranks

ROOT = Path(__file__).parents[1]
GRID = {"dim": (64, 128), "lr": (0.005, 0.01), "l2": (0.001, 0.003, 0.01)}
OPTIONS = ROOT / "configs" / "workload" / "recsys.yaml"
RESAMPLES = 10_000
Floats = NDArray[np.float64]


@dataclass
class Trained:
    """What a training leaves: metrics of every user on test, and the best mean on validation."""

    ndcg: Floats
    recall: float
    val_ndcg: float
    seconds: float = 0.0


def train(seed: int, *overrides: str) -> Trained:
    """One run of the command, in a folder that goes with it.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, str(ROOT / "src" / "train.py"), f"seed={seed}", "logger=none", "telemetry=none"]
        subprocess.run([*command, f"hydra.run.dir={folder}", *overrides], check=True, stdout=subprocess.DEVNULL)
        users, steps = rows_of(folder / "per_user_test.csv"), rows_of(folder / "metrics.csv")
        record = json.loads((folder / "run.json").read_text())
    return Trained(
        ndcg=np.array([float(user["ndcg_at_10"]) for user in users]),
        recall=float(np.mean([float(user["recall_at_10"]) for user in users])),
        val_ndcg=max(float(row["value"]) for row in steps if (row["split"], row["name"]) == ("val", "ndcg_at_10")),
        seconds=record["duration_s"],
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def tuned_factorisation(*overrides: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Overrides of the grid point that is best on validation, and all points."""
    best, chosen, table = -1.0, [], []
    for dim, lr, l2 in product(*GRID.values()):
        options = factorisation(dim, lr, l2)
        result = train(1, *overrides, *options)
        table.append({"dim": dim, "lr": lr, "l2": l2, "val_ndcg": result.val_ndcg})
        print(f"BPR-MF {table[-1]}", flush=True)
        if result.val_ndcg > best:
            best, chosen = result.val_ndcg, options
    return chosen, table


def factorisation(dim: int, lr: float, l2: float) -> list[str]:
    """Overrides that make the workload plain BPR matrix factorisation."""
    return [
        "workload.model.text=none",
        f"workload.model.dim={dim}",
        f"workload.model.l2={l2}",
        f"workload.optimizer.lr={lr}",
    ]


def interval(values: Floats) -> list[float]:
    """95 % of the bootstrapped means over users."""
    rng = np.random.default_rng(0)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]


def summary(result: Trained) -> dict[str, Any]:
    return {
        "ndcg_at_10": float(result.ndcg.mean()),
        "ci95": interval(result.ndcg),
        "recall_at_10": result.recall,
        "val_ndcg_at_10": result.val_ndcg,
        "seconds": round(result.seconds, 1),
    }


def difference(one: Trained, other: Trained) -> dict[str, Any]:
    """Of NDCG@10, first minus second, paired by user."""
    paired = one.ndcg - other.ndcg
    return {"mean": float(paired.mean()), "ci95": interval(paired)}


def popularity(data: Datasets) -> Trained:
    items = data.train.fetch(torch.arange(len(data.train)), SampleRng(0, 0))["pos"].numpy()
    val, test = (
        metrics_of_ranks(popularity_ranks(split, items, data.model_args["num_items"]))
        for split in (data.val, data.test)
    )
    return Trained(test["ndcg_at_10"], float(test["recall_at_10"].mean()), float(val["ndcg_at_10"].mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning quality of workload=recsys.")
    parser.add_argument("--data", help="MovieLens folder; left out: the embedded set")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of the default options, seeds 1, 2, ...")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    options: dict[str, Any] = yaml.safe_load(OPTIONS.read_text())
    source = {key: value for key, value in options["data"].items() if key != "_target_"} | {"path": chosen.data}
    overrides = [] if chosen.data is None else [f"workload.data.path={chosen.data}"]
    data = datasets(**source)

    base = popularity(data)
    defaults = [train(seed, *overrides) for seed in range(1, chosen.seeds + 1)]
    print(f"default {[round(float(result.ndcg.mean() / base.ndcg.mean()), 3) for result in defaults]} x popularity")
    tuned_options, grid = tuned_factorisation(*overrides)
    tuned = [train(seed, *overrides, *tuned_options) for seed in range(1, chosen.seeds + 1)]
    leaking = train(1, *overrides, *tuned_options, "workload.data.avoid_held_out=true")
    record = {
        "command": "python benchmarks/recsys_learning.py --out RECORD" + (" --data FOLDER" if chosen.data else ""),
        "data": Path(chosen.data).name if chosen.data else "embedded",
        "notes": data.notes,
        "popularity": summary(base),
        "bpr_mf_tuned": [summary(result) for result in tuned],
        "bpr_mf_tuning": {"overrides": tuned_options, "grid": grid},
        "default": [summary(result) for result in defaults],
        "default_options": options,
        "default_over_popularity": [float(result.ndcg.mean() / base.ndcg.mean()) for result in defaults],
        "bpr_mf_over_popularity": [float(result.ndcg.mean() / base.ndcg.mean()) for result in tuned],
        "default_minus_bpr_mf": [difference(one, other) for one, other in zip(defaults, tuned, strict=True)],
        "bpr_mf_avoid_held_out": summary(leaking) | {"what": "negatives never held-out items: leaks, not comparable"},
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    text = json.dumps(record, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
