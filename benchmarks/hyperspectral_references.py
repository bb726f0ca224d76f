"""Does the classifier of hyperspectral scenes learn? A tuned support vector machine and the default options.

    pip install -e '.[references]'
    python benchmarks/hyperspectral_references.py --out benchmarks/records/DATE_hyperspectral_references_DEVICE.json
    python benchmarks/hyperspectral_references.py --data X.mat --out RECORD

The reference is an SVM with RBF kernel on the mean spectrum of the 5 x 5 pixels around each, bands scaled by the
training pixels; C and gamma are the best of `GRID` on the validation pixels. Ours is ``python src/train.py
workload=hyperspectral`` as typed, with the weights that were best on the same validation pixels. For each seed there is
another embedded scene, or another split of the given one; blocks of ground and random pixels.
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
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from wellfed.contract import Datasets
from wellfed.record import git_state
from workloads.hyperspectral.data import datasets
from workloads.hyperspectral.evaluation import scores_of
from workloads.hyperspectral.patches import PatchData

ROOT = Path(__file__).parents[1]
GRID = {"C": (1, 10, 100, 1000), "gamma": ("scale", 0.0001, 0.001, 0.01)}
FIGURES = ("overall_accuracy", "average_accuracy", "kappa")
CHOSEN_BY = "average_accuracy"
"""On validation: settings of the SVM, the epoch of ours."""
REACH = 2
"""Of the mean: 5 x 5 pixels."""


def means(data: PatchData) -> tuple[np.ndarray, np.ndarray]:
    """Mean spectra around the labelled pixels of a split, and their classes."""
    labelled = torch.nonzero(data.label_N >= 0).squeeze(1)
    parts = []
    for indices in labelled.split(2048):
        batch = data.fetch(indices)
        middle = batch["rows"].shape[1] // 2
        near = slice(middle - REACH, middle + REACH + 1)
        parts.append(batch["rows"][:, near, near].double().mean((1, 2)))
    return torch.cat(parts).numpy(), data.label_N[labelled].numpy()


def figures(truth: np.ndarray, found: np.ndarray) -> dict[str, float]:
    count = max(truth.max(), found.max()) + 1
    confusion = np.zeros((count, count))
    np.add.at(confusion, (truth, found), 1)
    return scores_of(confusion)


def support_vectors(data: Datasets) -> dict[str, Any]:
    """Figures of the test pixels and the chosen settings."""
    (train, labels), (val, val_labels), (test, truth) = map(means, (data.train, data.val, data.test))
    scale = StandardScaler().fit(train)
    train, val, test = map(scale.transform, (train, val, test))
    tried = []
    for values in product(*GRID.values()):
        settings = dict(zip(GRID, values, strict=True))
        model = SVC(**settings).fit(train, labels)
        tried.append((figures(val_labels, model.predict(val))[CHOSEN_BY], settings, model))
    val_score, settings, model = max(tried, key=lambda each: each[0])
    largest = np.bincount(labels).argmax()
    return figures(truth, model.predict(test)) | {
        f"val_{CHOSEN_BY}": val_score,
        "settings": settings,
        "most_frequent_class": float((truth == largest).mean()),
        "pixels": {"train": len(labels), "val": len(val_labels), "test": len(truth)},
    }


def ours(seed: int, split: str, *overrides: str) -> dict[str, Any]:
    """Figures of the test pixels after one run of the command, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, str(ROOT / "src" / "train.py"), "workload=hyperspectral", "gpu=cpu", "logger=none"]
        options = [f"seed={seed}", f"workload.data.seed={seed}", f"workload.data.split={split}", *overrides]
        options += ["telemetry=none", "workload.data.whole_map=false", f"hydra.run.dir={folder}"]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, cwd=scratch)
        record = json.loads((folder / "run.json").read_text())
        with (folder / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["split"], row["name"]) == ("val", CHOSEN_BY)]
    found = {name: record["metrics"][f"test/{name}"] for name in FIGURES}
    best = max(float(row["value"]) for row in rows)
    return found | {f"val_{CHOSEN_BY}": best, "epochs": record["epochs"]}


def compared(split: str, seed: int, source: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Reference and ours, side by side."""
    with tempfile.TemporaryDirectory() as cache:
        given = {"num_components": 0, "passes": 1, "split": split, "seed": seed, "whole_map": False, "cache_dir": cache}
        reference = support_vectors(datasets(**source | given))
    row = {"seed": seed, "svm": reference, "ours": ours(seed, split, *overrides)}
    print(split, seed, {name: [round(row[who][name], 3) for who in ("svm", "ours")] for name in FIGURES}, flush=True)
    return row


def summary(split: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each figure and of the difference within a seed."""
    found: dict[str, Any] = {"split": split, "n": len(rows)}
    for name in FIGURES:
        values = {who: np.array([row[who][name] for row in rows]) for who in ("svm", "ours")}
        values["ours_minus_svm"] = values["ours"] - values["svm"]
        found[name] = {
            who: {"mean": float(each.mean()), "sd": float(each.std(ddof=min(1, len(rows) - 1)))}
            for who, each in values.items()
        }
        found[name]["seeds_ahead"] = int((values["ours_minus_svm"] > 0).sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning quality of workload=hyperspectral.")
    parser.add_argument("--data", help="cube with its ground truth beside it; left out: the embedded scenes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; no figure here is a time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="for the trainings")
    chosen = parser.parse_args()
    options = yaml.safe_load((ROOT / "configs" / "workload" / "hyperspectral.yaml").read_text())
    source = {key: value for key, value in options["data"].items() if key not in ("_target_", "cache_dir")}
    source["path"] = chosen.data and str(Path(chosen.data).absolute())
    if any(word.startswith("workload.data.") for word in chosen.overrides):
        parser.error("workload.data.* would give the trainings other pixels than the SVM; --data names another scene")
    overrides = [*([] if chosen.data is None else [f"workload.data.path={source['path']}"]), *chosen.overrides]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        waiting = {
            split: [pool.submit(compared, split, seed, source, overrides) for seed in range(1, chosen.seeds + 1)]
            for split in ("blocks", "random")
        }
        raw = {split: [each.result() for each in rows] for split, rows in waiting.items()}
    results = [summary(split, rows) for split, rows in raw.items()]
    said = [
        f"{each['split']}: overall accuracy {each['overall_accuracy']['ours']['mean']:.3f} against "
        f"{each['overall_accuracy']['svm']['mean']:.3f} of the SVM, ahead in "
        f"{each['overall_accuracy']['seeds_ahead']} of {each['n']} seeds"
        for each in results
    ]
    data = Path(chosen.data).name if chosen.data else "embedded scenes"
    record = {
        "theme": "hyperspectral_references",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/hyperspectral_references.py --out RECORD"
        + (f" --data {data}" if chosen.data else "")
        + "".join(f" {each}" for each in chosen.overrides),
        "git": git_state(ROOT),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "default"),
            "versions": {name: version(name) for name in ("torch", "numpy", "scikit-learn")},
            "python": platform.python_version(),
        },
        "config": {"data": data, "grid": GRID, "options": options},
        "results": results,
        "raw": raw,
        "says": f"On {data}: {'; '.join(said)}.",
    }
    text = json.dumps(record, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
