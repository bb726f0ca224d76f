"""Does the classifier of clips learn? Logistic regression on MFCC statistics beside it, on the same clips.

    python benchmarks/speech_references.py --out benchmarks/records/DATE_speech_references_DEVICE.json
    python benchmarks/speech_references.py --set voices --set letters --set drums --sets 3 --epochs 8 --out RECORD

Needs scikit-learn. ``--set`` names recordings that nobody prepared for this (`REAL_SETS`): packages of Debian that
``apt-get download`` brings, unpacked into a folder of ``--cache``. With it, or with ``--data`` for one folder or set of
shards, the clips are split anew for each seed. Without both five embedded sets are drawn (``workload.data.seed``: other
speakers, clips and splits). On each the classifier is trained as a user types it, ``python src/train.py workload=speech
trainer.max_epochs=5``, and tested with the weights that were best on validation.
The regression gets, of 20 MFCC (the cosine transform of the same log-mel spectrograms) and their first and second
differences, the mean, spread, least, middle and greatest over the sound, scaled; its penalty is chosen on validation.
Both are tested on the same clips, once; nothing is chosen by that. No speaker of the embedded clips was trained on.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import finish, interval  # noqa: E402
from workloads.speech.clips import ClipData  # noqa: E402
from workloads.speech.data import datasets  # noqa: E402

PENALTIES = (0.001, 0.01, 0.1, 1.0)
"""C of scikit-learn: the inverse of the penalty."""
NUM_MFCC = 20
_DRUMS = {
    "kick": r"kick|bass|bd",
    "snare": r"snare|^sn|rim",
    "hihat": r"hat|hh",
    "tom": r"tom",
    "cymbal": r"crash|ride|cymbal|china|splash",
}


def _drum(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for kind, pattern in _DRUMS.items() if re.search(pattern, name)), None)


@dataclass(frozen=True)
class RealSet:
    """Recordings in packages of Debian, and the class of each by its path."""

    what: str
    licence: str
    packages: tuple[str, ...]
    files: str
    """Pattern below the folder that the packages are unpacked into."""
    class_of: Callable[[Path], str | None]


REAL_SETS = {
    "voices": RealSet(
        "digits and letters by five speakers of telephone prompts, 8 kHz; class = speaker",
        "CC-BY-SA-3.0, CC-BY-3.0",
        tuple(f"asterisk-core-sounds-{language}-wav" for language in ("en", "es", "fr", "it", "ru")),
        "usr/share/asterisk/sounds/*/[dl][ie][gt][it]*/*.wav",
        lambda path: path.parts[-3],
    ),
    "letters": RealSet(
        "letters and syllables in the six languages that have about 100 of them, ogg of 44.1 kHz; class = language",
        "GPL-2+",
        ("klettres-data",),
        "usr/share/klettres/*/*/*.ogg",
        lambda path: path.parts[-3] if path.parts[-3] in ("es", "it", "lt", "pt_BR", "ru", "uk") else None,
    ),
    "drums": RealSet(
        "hits of drum kits, wav and flac of 22 to 48 kHz, 0.02 to 12 s; class = kind of drum by the name of the file",
        "GPL-2+ and others",
        ("hydrogen-drumkits",),
        "usr/share/hydrogen/data/drumkits/*/*.[wf][al][va]*",
        _drum,
    ),
    "studio": RealSet(
        "samples of a music program, flac of 44.1 kHz; class = first word of the name, of those with 8 samples",
        "CC0-1.0",
        ("sonic-pi-samples",),
        "usr/share/sonic-pi/samples/*.flac",
        lambda path: path.name.split("_")[0],
    ),
}
FEWEST_CLIPS = 8
"""Minimum number of clips of a class; smaller classes are left out."""


def real_set(name: str, cache: Path) -> Path:
    """Returns the folder of classes; downloads and links it if it is missing."""
    found, folder = REAL_SETS[name], cache / "real" / name
    if folder.is_dir():
        return folder
    unpacked = cache / "real" / f"{name}-packages"
    unpacked.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *found.packages], cwd=unpacked, check=True, stdout=subprocess.DEVNULL)
    for package in sorted(unpacked.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
    by_class: dict[str, list[Path]] = {}
    for path in sorted(unpacked.glob(found.files)):
        if (label := found.class_of(path)) is not None:
            by_class.setdefault(label, []).append(path)
    for label, paths in by_class.items():
        if len(paths) >= FEWEST_CLIPS:
            (folder / label).mkdir(parents=True)
            for path in paths:
                (folder / label / f"{path.parent.name}_{path.name}").symlink_to(path)
    return folder


Floats = NDArray[np.float64]


def mfcc_statistics(log_mel_MT: Floats) -> Floats:
    """[5 x 3 x NUM_MFCC] of the sound of one clip."""
    num_mels, num_frames = log_mel_MT.shape
    place_M = (np.arange(num_mels) + 0.5) * np.pi / num_mels
    mfcc_CT = np.cos(np.arange(NUM_MFCC)[:, None] * place_M) @ log_mel_MT
    if num_frames < 2:
        mfcc_CT = mfcc_CT.repeat(2, axis=1)
    slope_CT = np.gradient(mfcc_CT, axis=1)
    all_CT = np.concatenate([mfcc_CT, slope_CT, np.gradient(slope_CT, axis=1)])
    found = [all_CT.mean(1), all_CT.std(1), all_CT.min(1), np.median(all_CT, axis=1), all_CT.max(1)]
    return np.concatenate(found)


def regression(options: dict[str, Any]) -> dict[str, Any]:
    """Accuracy on test of the penalty that is best on validation."""
    data = datasets(**options)
    assert data.features is not None
    assert data.features.store is not None
    assert isinstance(data.train, ClipData)
    log_mel_NMT, sounds = data.features.store().double().numpy(), data.train.table.sounds
    spans = [(0, None)] * len(log_mel_NMT) if sounds is None else sounds.tolist()
    pairs = zip(log_mel_NMT, spans, strict=True)
    statistics_NS = np.stack([mfcc_statistics(clip_MT[:, first:end]) for clip_MT, (first, end) in pairs])
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
    return {
        "test_accuracy": test,
        "val_accuracy": best,
        "C": chosen,
        "classes": data.model_args["num_classes"],
        "clips": {split: len(labels) for split, (_, labels) in parts.items()},
        "derived": {knob: list(found) for knob, found in data.derived.items()},
        "most_frequent_class": float((parts["test"][1] == np.bincount(parts["train"][1]).argmax()).mean()),
    }


def trained(options: dict[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    """Runs the command once, in a temporary folder."""
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


def compared(name: str, options: dict[str, Any], seed: int, epochs: int) -> dict[str, Any]:
    """Reference and network on the same clips."""
    regressed = regression(options | {"passes": 1})
    regressed["derived"] = datasets(**options).derived
    print(f"{name} {seed}: logistic regression {regressed['test_accuracy']:.4f}", flush=True)
    network = trained(options, epochs, seed + 1)
    print(f"{name} {seed}: default options {network['test_accuracy']:.4f} in {network['seconds']} s", flush=True)
    return {"data": name, "set": seed, "logistic_regression": regressed, "default": network}


def table(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each source of clips, with the interval of the difference within a seed."""
    rows = []
    for name in dict.fromkeys(each["data"] for each in raw):
        mine = [each for each in raw if each["data"] == name]
        row: dict[str, Any] = {"data": name, "n": len(mine)}
        for variant in ("logistic_regression", "default"):
            row[variant] = [each[variant]["test_accuracy"] for each in mine]
            row[f"{variant}_mean"] = statistics.fmean(row[variant])
        paired = [ours - other for ours, other in zip(row["default"], row["logistic_regression"], strict=True)]
        row["difference_mean"], row["difference"] = statistics.fmean(paired), paired
        row["difference_ci95"] = interval(paired) if len(paired) > 1 else None
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of classes or of shards; left out: the embedded set")
    parser.add_argument("--set", action="append", choices=REAL_SETS, help="recordings of packages; may be repeated")
    parser.add_argument("--sets", type=int, default=5, help="embedded sets, or splits of the others")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    places: dict[str, Path | None] = {name: real_set(name, chosen.cache.resolve()) for name in chosen.set or ()}
    if chosen.data:
        places[Path(chosen.data).name] = Path(chosen.data).resolve()
    raw = list[dict[str, Any]]()
    for seed in range(chosen.sets):
        for name, place in (places or {"embedded": None}).items():
            options: dict[str, Any] = {"seed": seed, "cache_dir": str(chosen.cache)}
            raw.append(
                compared(name, options if place is None else options | {"path": str(place)}, seed, chosen.epochs)
            )
            write(chosen, raw)


def write(chosen: argparse.Namespace, raw: list[dict[str, Any]]) -> None:
    """Writes the record of what has been compared so far."""
    results = table(raw)
    says = "; ".join(
        f"{row['data']} {row['default_mean']:.3f} beside {row['logistic_regression_mean']:.3f} "
        f"(difference {min(row['difference']):+.3f} to {max(row['difference']):+.3f}, n={row['n']})"
        for row in results
    )
    sources = {name: REAL_SETS[name] for name in chosen.set or ()}
    config = {
        "data": {
            name: {"what": one.what, "licence": one.licence, "packages": one.packages} for name, one in sources.items()
        },
        "epochs": chosen.epochs,
        "num_mfcc": NUM_MFCC,
        "penalties": PENALTIES,
        "scikit-learn": sklearn.__version__,
    }
    says = f"Accuracy after {chosen.epochs} epochs beside logistic regression on MFCC statistics: {says}."
    finish("speech_references", results, says, chosen.out, config=config)


if __name__ == "__main__":
    main()
