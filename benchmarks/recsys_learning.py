"""Does the recommender learn? Popularity, tuned BPR matrix factorisation and the default options, same users.

    python benchmarks/fetch_ml100k.py FOLDER
    python benchmarks/recsys_learning.py --data FOLDER --out benchmarks/records/DATE_recsys_learning_DEVICE.json

Leave-last-out by time, ranking of the whole catalogue, NDCG@10 of the test item at the epoch that is best on
validation. Matrix factorisation is tuned on validation over `GRID`; the default options are those of
configs/workload/recsys.yaml. Differences come with a paired bootstrap over users.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from wellfed.contract import Datasets
from wellfed.sample_rng import SampleRng
from workloads.recsys.data import datasets
from workloads.recsys.evaluation import metrics_of_ranks, popularity_ranks
from workloads.recsys.model import TwoTowerRecommender

GRID = {"dim": (64, 128), "lr": (0.005, 0.01), "l2": (0.001, 0.003, 0.01)}
OPTIONS = Path(__file__).parents[1] / "configs" / "workload" / "recsys.yaml"
RESAMPLES = 10_000
Floats = NDArray[np.float64]


@dataclass
class Trained:
    """What a training leaves: NDCG@10 of every user on test, and on validation in the mean, at the best epoch."""

    ndcg: Floats
    recall: float
    val_ndcg: float
    epoch: int
    seconds: float


class Table:
    """Features computed once."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def rows(self, indices: Tensor) -> Tensor:
        return self._rows.index_select(0, indices)


def train(data: Datasets, options: dict[str, Any], epochs: int, seed: int) -> Trained:
    """A plain loop over the contract's methods. To be replaced by ``src/train.py`` for the default options."""
    began_at_s = time.perf_counter()
    torch.manual_seed(seed)
    model = TwoTowerRecommender(**data.model_args, **options["model"])
    wanted = model.features()
    features = () if wanted is None else (Table(torch.cat([wanted.rows(r) for r in chunks(wanted.num_rows, 512)])),)
    batch_size = options["effective_batch_size"]
    steps = epochs * math.ceil(len(data.train) / batch_size)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), **options["optimizer"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = Trained(np.zeros(0), 0.0, -1.0, 0, 0.0)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(data.train), generator=SampleRng(seed, epoch))
        for indices in order.split(batch_size):
            rng = SampleRng(seed, epoch)
            batch = data.train.on_device(data.train.fetch(indices, rng), rng, *features)
            optimizer.zero_grad()
            model.loss(batch).loss.backward()
            optimizer.step()
            schedule.step()
        val_ndcg = float(evaluate(model, data, "val", features)["ndcg_at_10"].mean())
        if val_ndcg > best.val_ndcg:
            test = evaluate(model, data, "test", features)
            best = Trained(test["ndcg_at_10"], float(test["recall_at_10"].mean()), val_ndcg, epoch + 1, 0.0)
    best.seconds = time.perf_counter() - began_at_s
    return best


def evaluate(model: TwoTowerRecommender, data: Datasets, split: str, features: tuple[Table, ...]) -> dict[str, Floats]:
    """Metrics of each user."""
    model.eval()
    users, evaluation = getattr(data, split), data.evaluation
    evaluation.reset()
    for rows in chunks(len(users), 512):
        evaluation.update(model, users.fetch(rows), *features)
    return evaluation.per_user()


def chunks(count: int, size: int) -> Iterator[Tensor]:
    return iter(torch.arange(count).split(size))


def tuned_factorisation(data: Datasets, epochs: int, seed: int) -> tuple[Trained, dict[str, Any], list[dict[str, Any]]]:
    """The grid point that is best on validation, its options, and all points."""
    best, chosen, table = None, {}, []
    for dim, lr, l2 in product(*GRID.values()):
        options = factorisation_options(dim, lr, l2)
        result = train(data, options, epochs, seed)
        table.append({"dim": dim, "lr": lr, "l2": l2, "val_ndcg": result.val_ndcg, "epoch": result.epoch})
        print(f"BPR-MF {table[-1]}", flush=True)
        if best is None or result.val_ndcg > best.val_ndcg:
            best, chosen = result, options
    assert best is not None
    return best, chosen, table


def factorisation_options(dim: int, lr: float, l2: float) -> dict[str, Any]:
    return {
        "model": {"text": "none", "dim": dim, "l2": l2},
        "optimizer": {"lr": lr, "weight_decay": 0.0},
        "effective_batch_size": 2048,
    }


def default_options() -> dict[str, Any]:
    """Of the yaml, without the targets."""
    options: dict[str, Any] = yaml.safe_load(OPTIONS.read_text())
    for group in ("model", "data", "optimizer"):
        del options[group]["_target_"]
    assert options["schedule"] == {"name": "cosine", "warmup_steps": 0, "min_lr_frac": 0.0}, "the loop knows this only"
    return options


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
        "epoch": result.epoch,
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
    return Trained(test["ndcg_at_10"], float(test["recall_at_10"].mean()), float(val["ndcg_at_10"].mean()), 0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning quality of workload=recsys.")
    parser.add_argument("--data", help="MovieLens folder; left out: the embedded set")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of the default options, seeds 1, 2, ...")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    options = default_options()
    source = options["data"] | {"path": chosen.data}
    data = datasets(**source)

    base = popularity(data)
    defaults = [train(data, options, chosen.epochs, seed) for seed in range(1, chosen.seeds + 1)]
    tuned, tuned_options, grid = tuned_factorisation(data, chosen.epochs, seed=1)
    leaking = train(datasets(**source | {"avoid_held_out": True}), tuned_options, chosen.epochs, seed=1)
    record = {
        "data": Path(chosen.data).name if chosen.data else "embedded",
        "notes": data.notes,
        "epochs": chosen.epochs,
        "popularity": summary(base),
        "bpr_mf_tuned": summary(tuned) | {"options": tuned_options, "grid": grid},
        "default": [summary(result) for result in defaults],
        "default_options": options,
        "default_over_popularity": [float(result.ndcg.mean() / base.ndcg.mean()) for result in defaults],
        "default_minus_bpr_mf": [difference(result, tuned) for result in defaults],
        "bpr_mf_avoid_held_out": summary(leaking) | {"what": "negatives never held-out items: leaks, not comparable"},
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": chosen.threads,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    text = json.dumps(record, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
