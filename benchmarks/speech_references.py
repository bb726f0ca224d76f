"""Does the classifier of clips learn? Logistic regression on MFCC statistics beside it, on the same clips.

    python benchmarks/speech_references.py --out benchmarks/records/DATE_speech_references_DEVICE.json

Needs scikit-learn. Five embedded sets are drawn (``workload.data.seed``: other speakers, clips and splits), or
with ``--data`` one folder or set of shards is split five times. On each the classifier is trained as a user types it,
``python src/train.py workload=speech trainer.max_epochs=5``, and tested with the weights that were best on validation.
The regression gets, of 20 MFCC (the cosine transform of the same log-mel spectrograms) and their first and second
differences, the mean, spread, least, middle and greatest over time, scaled; its penalty is chosen on validation. Both
are tested on the same clips; no speaker of them was trained on.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from wellfed.hardware.detect import machine  # noqa: E402
from wellfed.record import git_state  # noqa: E402
from wellfed.timing.interval import student_t_975  # noqa: E402
from workloads.speech.clips import ClipData  # noqa: E402
from workloads.speech.data import datasets  # noqa: E402

PENALTIES = (0.001, 0.01, 0.1, 1.0)
"""C of scikit-learn: the inverse of the penalty."""
NUM_MFCC = 20
Floats = NDArray[np.float64]


def mfcc_statistics(log_mel_NMT: Floats) -> Floats:
    """[N, 5 x 3 x NUM_MFCC]."""
    num_mels = log_mel_NMT.shape[1]
    place_M = (np.arange(num_mels) + 0.5) * np.pi / num_mels
    cosine_CM = np.cos(np.arange(NUM_MFCC)[:, None] * place_M)
    mfcc = np.einsum("cm,nmt->nct", cosine_CM, log_mel_NMT)
    parts = [mfcc, np.gradient(mfcc, axis=2), np.gradient(np.gradient(mfcc, axis=2), axis=2)]
    all_NCT = np.concatenate(parts, axis=1)
    found = [all_NCT.mean(2), all_NCT.std(2), all_NCT.min(2), np.median(all_NCT, axis=2), all_NCT.max(2)]
    return np.concatenate(found, axis=1)


def regression(options: dict[str, Any]) -> dict[str, Any]:
    """Accuracy on test of the penalty that is best on validation."""
    data = datasets(**options)
    assert data.features is not None
    assert data.features.store is not None
    statistics_NS = mfcc_statistics(data.features.store().double().numpy())
    parts = {}
    for split in ("train", "val", "test"):
        clips = getattr(data, split)
        assert isinstance(clips, ClipData)
        parts[split] = statistics_NS[clips.clip_S.numpy()], clips.label_S.numpy()
    scaler = StandardScaler().fit(parts["train"][0])
    scaled = {split: (scaler.transform(values), labels) for split, (values, labels) in parts.items()}
    best, chosen, test = -1.0, 0.0, 0.0
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=5000).fit(*scaled["train"])
        if (val := model.score(*scaled["val"])) > best:
            best, chosen, test = val, penalty, model.score(*scaled["test"])
    return {"test_accuracy": test, "val_accuracy": best, "C": chosen, "classes": data.model_args["num_classes"]}


def trained(options: dict[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    """One run of the command, in a folder that goes with it."""
    overrides = [f"workload.data.{name}={value}" for name, value in options.items() if name != "cache_dir"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, str(ROOT / "src" / "train.py"), "workload=speech", f"seed={seed}", "logger=none"]
        command += ["telemetry=none", f"trainer.max_epochs={epochs}", f"hydra.run.dir={folder}"]
        command += [f"paths.cache_dir={options['cache_dir']}", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        record = json.loads((folder / "run.json").read_text())
        with (folder / "confusion_test.csv").open(newline="") as stream:
            confusion = list(csv.reader(stream))
    return {
        "test_accuracy": record["metrics"]["test/accuracy"],
        "steps": record["steps"],
        "seconds": round(record["duration_s"], 1),
        "confusion": confusion,
    }


def interval(values: list[float]) -> list[float]:
    """95 % interval of the mean."""
    half = student_t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of classes or of shards; left out: the embedded set")
    parser.add_argument("--sets", type=int, default=5, help="embedded sets, or splits of --data")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cache", default=str(ROOT / ".cache"))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    raw = []
    for seed in range(chosen.sets):
        options: dict[str, Any] = {"seed": seed, "cache_dir": chosen.cache}
        if chosen.data:
            options["path"] = str(Path(chosen.data).resolve())
        regressed = regression(options)
        print(f"set {seed}: logistic regression {regressed}", flush=True)
        network = trained(options, chosen.epochs, seed + 1)
        print(f"set {seed}: default options {network['test_accuracy']:.4f} in {network['seconds']} s", flush=True)
        raw.append({"set": seed, "logistic_regression": regressed, "default": network})
    results = []
    for name in ("logistic_regression", "default"):
        found = [each[name]["test_accuracy"] for each in raw]
        results.append(
            {"variant": name, "n": len(found), "test_accuracy_mean": statistics.fmean(found), "ci95": interval(found)}
        )
    paired = [each["default"]["test_accuracy"] - each["logistic_regression"]["test_accuracy"] for each in raw]
    results.append({"variant": "difference, by set", "n": len(paired), "mean": statistics.fmean(paired)})
    results[-1]["ci95"] = interval(paired)
    says = (
        f"Accuracy on clips of speakers that were not trained on: {results[1]['test_accuracy_mean']:.3f} after "
        f"{chosen.epochs} epochs, {results[0]['test_accuracy_mean']:.3f} for logistic regression on MFCC statistics, "
        f"1 of {raw[0]['logistic_regression']['classes']} for guessing; ahead by {min(paired):.3f} to "
        f"{max(paired):.3f}."
    )
    record = {
        "theme": "speech_references",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/speech_references.py --sets {chosen.sets} --epochs {chosen.epochs} --out RECORD"
        + (" --data FOLDER" if chosen.data else ""),
        "git": {key: value for key, value in (git_state(ROOT) or {}).items() if key != "diff"},
        "machine": {"load": os.getloadavg(), **machine().to_dict()},
        "versions": {"scikit-learn": sklearn.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "config": {
            "data": Path(chosen.data).name if chosen.data else "embedded",
            "epochs": chosen.epochs,
            "num_mfcc": NUM_MFCC,
            "penalties": PENALTIES,
        },
        "results": results,
        "raw": raw,
        "says": says,
    }
    print(says)
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
