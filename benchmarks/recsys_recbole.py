"""Trains BPR on MovieLens-100K by wellfed and by RecBole: rate, whole command and NDCG@10 of the same job.

    python benchmarks/recsys_recbole.py [--rounds 5] [--epochs 12] [--out RECORD]

Both hold out the last interaction by time of each user for the test and the one before for the validation, rank the
whole catalogue, train vectors of 64 in batches of 2,048 with one uniform negative for each interaction, and validate
after each epoch. Each has its own regularisation and schedule: RecBole's BPR has none; ours has a bias of items, L2 and
a cosine. RecBole's learning rate is the best of .003, .005 and .01 by its validation after 12 epochs; ours is set by
hand. RecBole's package brings the data; ours reads
the same ratings (`fetch_ml100k.py`). Rates are triplets/s over the steps alone; "loading" has no model. All are
processes of their own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import compared, finish, has  # noqa: E402

BATCH, DIM = 2048, 64
RATES = {"ours": 0.01, "recbole": 0.005}
PEER = "RecBole"


def by_recbole(epochs: int, seed: int, out: Path, lr: float) -> None:
    """Trains, validates and tests by RecBole's own classes; writes figures to ``out``."""
    import numpy as np

    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_, "bool8": np.bool_}.items():
        if not hasattr(np, name):  # RecBole 1.2.1 was written for numpy 1
            setattr(np, name, kind)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its checkpoints hold its configuration
    import recbole
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.general_recommender import BPR
    from recbole.trainer import Trainer
    from recbole.utils import init_logger, init_seed

    class TimedTrainer(Trainer):  # type: ignore[misc]
        train_s = 0.0

        def _train_epoch(self, *arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            found = super()._train_epoch(*arguments, **options)
            self.train_s += time.perf_counter() - began_s
            return found

    folder = Path(recbole.__file__).parent / "dataset_example"
    options = {
        "data_path": str(folder),
        "epochs": epochs,
        "train_batch_size": BATCH,
        "embedding_size": DIM,
        "learning_rate": lr,
        "eval_args": {"split": {"LS": "valid_and_test"}, "group_by": "user", "order": "TO", "mode": "full"},
        "metrics": ["NDCG"],
        "topk": [10],
        "valid_metric": "NDCG@10",
        "metric_decimal_place": 6,
        "stopping_step": epochs,
        "use_gpu": False,
        "show_progress": False,
        "seed": seed,
        "checkpoint_dir": str(out.parent / "saved"),
    }
    sys.argv = sys.argv[:1]  # RecBole reads the command line
    config = Config(model="BPR", dataset="ml-100k", config_dict=options)
    init_seed(config["seed"], config["reproducibility"])
    init_logger(config)
    data = create_dataset(config)
    train, val, test = data_preparation(config, data)
    model = BPR(config, train.dataset)
    trainer = TimedTrainer(config, model)
    best, _ = trainer.fit(train, val, saved=True, show_progress=False)
    found = trainer.evaluate(test, load_best_model=True, show_progress=False)
    began_s = time.perf_counter()
    for _ in train:
        pass
    loading_s = time.perf_counter() - began_s
    figures = {
        "triplets": len(train.dataset),
        "rate": epochs * len(train.dataset) / trainer.train_s,
        "loading_rate": len(train.dataset) / loading_s,
        "loading_s": loading_s,
        "val_ndcg": float(best),
        "ndcg": float(found["ndcg@10"]),
    }
    out.write_text(json.dumps(figures))


def recbole_run(epochs: int, seed: int, lr: float) -> dict[str, float]:
    """Returns the figures of a command of RecBole, and its seconds without the pass over the loader alone."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        words = ["--worker", str(out), "--epochs", str(epochs), "--seed", str(seed), "--lr", str(lr)]
        seconds = timed([__file__, *words], folder)
        found: dict[str, float] = json.loads(out.read_text())
    return {**found, "seconds": seconds - found["loading_s"]}


def our_run(epochs: int, seed: int, data: Path, lr: float) -> dict[str, float]:
    """Returns the same of `src/train.py`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [
            *("workload=recsys", f"workload.data.path={data}", "workload.data.passes=1", "workload.model.text=none"),
            *(f"workload.model.dim={DIM}", f"workload.effective_batch_size={BATCH}", f"workload.optimizer.lr={lr}"),
            *(f"trainer.max_epochs={epochs}", f"seed={seed}", "logger=none", f"hydra.run.dir={run}"),
        ]
        seconds = timed([str(ROOT / "src" / "train.py"), *words], folder)
        record = json.loads((run / "run.json").read_text())
    metrics = record["metrics"]
    return {
        "rate": record["throughput"]["samples_per_s"],
        "val_ndcg": metrics["val/ndcg_at_10"],
        "ndcg": metrics["test/ndcg_at_10"],
        "seconds": seconds,
    }


def our_loading_rate(data: Path) -> float:
    """Returns triplets/s of an epoch of our loader in this process, after one that is not counted."""
    from wellfed.data.settings import LoaderSettings
    from wellfed.data.train_loader import train_loader
    from workloads.recsys.data import datasets

    train = datasets(str(data), passes=1).train
    loader = train_loader(train, batch_size=BATCH, seed=0, settings=LoaderSettings())
    for number in range(2):
        began_s = time.perf_counter()
        for _ in loader:
            pass
        took_s = time.perf_counter() - began_s if number else 0.0
    loader.close()
    return len(train) / took_s


def timed(words: list[str], folder: str) -> float:
    """Returns the seconds of a command of Python."""
    began_s = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, help="of both, instead of `RATES`")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.worker:
        by_recbole(asked.epochs, asked.seed, asked.worker, asked.lr)
        return
    if not has("recbole"):
        rows = [{"what": f"BPR on MovieLens-100K, {asked.epochs} epochs", "peer": PEER, "verdict": "not installed"}]
        finish("recbole", [], "RecBole, which brings the data, is not installed.", asked.out, config={}, compared=rows)
        return
    from benchmarks import fetch_ml100k

    rates = {name: asked.lr or lr for name, lr in RATES.items()}
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "ml-100k"
        fetch_ml100k.main(data)
        for number in range(asked.rounds):
            for name in ("ours", "recbole") if number % 2 else ("recbole", "ours"):
                seed = asked.seed + number
                if name == "ours":
                    loading = {"loading_rate": our_loading_rate(data)}
                    ours.append({**our_run(asked.epochs, seed, data, rates["ours"]), **loading})
                else:
                    theirs.append(recbole_run(asked.epochs, seed, rates["recbole"]))
            print(number, {"ours": ours[-1], PEER: theirs[-1]}, flush=True)
    rows = []
    for what, unit, key in (
        ("loading triplets of MovieLens-100K", "triplets/s", "loading_rate"),
        ("training BPR on MovieLens-100K", "triplets/s", "rate"),
        (f"a command of {asked.epochs} epochs of it", "s", "seconds"),
        ("NDCG@10 on test after them", "", "ndcg"),
    ):
        own, its = ([run[key] for run in runs] for runs in (ours, theirs))
        rows += compared(what, unit, own, {PEER: its}, less_is_better=key == "seconds")
    results = [
        {"program": name, "n": len(runs), **{f"{key}_median": median(run[key] for run in runs) for key in ours[0]}}
        for name, runs in (("wellfed", ours), (PEER, theirs))
    ]
    val = {name: round(fmean(run["val_ndcg"] for run in runs), 4) for name, runs in (("wellfed", ours), (PEER, theirs))}
    says = f"{rows[1]['times']:.2f} times RecBole's rate, {rows[2]['times']:.2f} times its speed."
    config = {"batch": BATCH, "dim": DIM, "epochs": asked.epochs, "learning_rates": rates, "val_ndcg_mean": val}
    finish("recbole", results, says, asked.out, config=config, compared=rows)


if __name__ == "__main__":
    main()
