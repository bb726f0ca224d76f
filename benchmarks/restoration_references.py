"""How well are photographs denoised? Non-local means, BM3D and two trainings of our model, same noise for all.

    pip install -e '.[references]'
    python benchmarks/restoration_references.py --work FOLDER --out RECORD

    python benchmarks/restoration_references.py --work FOLDER --set lomiri,mate,plasma --out RECORD

``--set`` takes photographs of Debian packages of wallpapers, which apt-get downloads into ``--work``. Two thirds are
trained on with the defaults; the centres of the others are restored by that model and by non-local means, whose
strength is the best on the photographs trained on. Without it:

Judged on the colour photographs that scikit-image and scikit-learn bring along, at a noise of 25 of 255. Our model is
trained by ``python src/train.py workload=restoration gpu=cpu`` as typed: on the embedded dead leaves, which know
nothing of photographs; and on photographs, half of them at a time, so that each is restored by a model that never saw
it. Non-local means gets the true noise and the best of its two modes, of `NLM_STRENGTHS` and of two distances, chosen
on the very images it is judged on. Whole images in floats, clipped to 0..1; PSNR and SSIM by scikit-image. What
``--work`` holds is not done again: each reference image takes up to a minute, each training some.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import finish
from numpy.typing import NDArray
from packages import debian
from PIL import Image

from wellfed.run.objects.load_model import load_model
from workloads.restoration.degradations import Degradation

ROOT = Path(__file__).parents[1]
SIGMA = 25.0
PHOTOGRAPHS = {  # those of one fold in turns with those of the other
    "astronaut": "skimage/data/astronaut.png",
    "chelsea": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "rocket": "skimage/data/rocket.jpg",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "china": "sklearn/datasets/images/china.jpg",
    "flower": "sklearn/datasets/images/flower.jpg",
}
GREY = ("brick", "camera", "coins", "grass", "gravel")
"""Photographs without colour, of scikit-image: trained on in both folds, judged in none."""
NLM_STRENGTHS = {True: (0.5, 0.6, 0.7, 0.8, 0.9), False: (0.4, 0.5, 0.6, 0.7)}
"""Strength of the filter in multiples of the noise, in the fast mode and in the other; 0.8 and 0.6 are recommended."""
NLM_DISTANCES = (6, 11)
"""Search distances in pixels; the larger one is tried at each mode's best strength."""
DRAWN = ("DarkestHour", "Grey", "Kite", "PastelHills", "summer_1am")
SETS = {
    "lomiri": (
        ("lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04"),
        "usr/share/backgrounds/*.jpg",
        ("analogpattern", "Painting-Colors"),
    ),
    "mate": (("mate-backgrounds",), "usr/share/backgrounds/mate/nature/*.jpg", ()),
    "plasma": (("plasma-workspace-wallpapers",), "usr/share/wallpapers/*/contents/images/2560x1600.jpg", DRAWN),
}
"""Debian packages, where their photographs lie, and which pictures there are drawn."""
CENTRE = 256
"""Side of what is judged of each photograph of a set."""
CROPS_AN_EPOCH = 1536
"""Crops per epoch, the same number as with the embedded set."""
Floats = NDArray[np.float64]


def photograph(name: str) -> NDArray[np.uint8]:
    package, inside = PHOTOGRAPHS[name].split("/", 1)
    return read(package, inside)


def read(package: str, inside: str) -> NDArray[np.uint8]:
    """RGB [H, W, 3] of a file that a package brings along."""
    module = __import__(package)
    with Image.open(Path(module.__file__).parent / inside) as image:  # type: ignore[arg-type]
        return np.array(image.convert("RGB"))


def noisy_of(number: int, clean: NDArray[np.uint8]) -> Floats:
    image = torch.from_numpy(clean).permute(2, 0, 1)
    return Degradation("denoise", SIGMA).for_evaluation(image, number).permute(1, 2, 0).double().numpy()


def figures(restored: Floats, clean: NDArray[np.uint8]) -> dict[str, float]:
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    truth, restored = clean / 255, np.clip(restored, 0, 1)
    window = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    return {
        "psnr": float(peak_signal_noise_ratio(truth, restored, data_range=1.0)),
        "ssim": float(structural_similarity(truth, restored, data_range=1.0, channel_axis=-1, **window)),
    }


def non_local_means(noisy: Floats, *, fast: bool, h: float, patch_distance: int) -> Floats:
    from skimage.restoration import denoise_nl_means

    sigma = SIGMA / 255
    size = {"patch_size": 5, "patch_distance": patch_distance}
    restored: Floats = denoise_nl_means(noisy, h=h * sigma, sigma=sigma, fast_mode=fast, channel_axis=-1, **size)
    return restored


def bm3d(noisy: Floats) -> Floats:
    from bm3d import bm3d_rgb

    restored: Floats = bm3d_rgb(noisy, SIGMA / 255)
    return restored


def ours(model: torch.nn.Module, noisy: Floats) -> Floats:
    """The whole image at once, its edges mirrored by 32 pixels as in the evaluation's tiles."""
    image = torch.from_numpy(noisy).float().permute(2, 0, 1).unsqueeze(0)
    wide = torch.nn.functional.pad(image, (32, 32, 32, 32), mode="reflect")
    with torch.inference_mode():
        restored = model(wide)[0, :, 32:-32, 32:-32]
    return restored.permute(1, 2, 0).double().numpy()


class Work:
    """Restored figures by method and image, kept in a file as they come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._file = folder, folder / "figures.json"
        self.found: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    def judge(self, method: str, restore: Callable[[Floats], Floats]) -> None:
        """``restore`` all photographs that this method has not restored yet."""
        for number, name in enumerate(PHOTOGRAPHS):
            self.judge_one(method, name, number, restore)

    def judge_one(self, method: str, name: str, number: int, restore: Callable[[Floats], Floats]) -> None:
        rows = self.found.setdefault(method, {})
        if name in rows:
            return
        clean = photograph(name)
        noisy = noisy_of(number, clean)
        began_at_s = time.perf_counter()
        restored = restore(noisy)
        rows[name] = figures(restored, clean) | {"seconds": round(time.perf_counter() - began_at_s, 2)}
        print(method, name, rows[name], flush=True)
        self._file.write_text(json.dumps(self.found, indent=1))


def tune_non_local_means(work: Work) -> str:
    """Restore by all that is to be tried; gives the name of the best."""
    best = []
    for is_fast, strengths in NLM_STRENGTHS.items():
        tried = {run_non_local_means(work, is_fast, h, NLM_DISTANCES[0]): h for h in strengths}
        h = tried[best_of(work, list(tried))]
        best.append(best_of(work, [*tried, run_non_local_means(work, is_fast, h, NLM_DISTANCES[1])]))
    return best_of(work, best)


def run_non_local_means(work: Work, is_fast: bool, h: float, distance: int) -> str:
    """Its name."""
    name = f"nlm fast={str(is_fast).lower()} h={h} patch_distance={distance}"
    work.judge(name, lambda noisy: non_local_means(noisy, fast=is_fast, h=h, patch_distance=distance))
    return name


def best_of(work: Work, names: list[str]) -> str:
    return max(names, key=lambda name: mean(work.found[name], "psnr"))


def mean(rows: dict[str, dict[str, float]], figure: str) -> float:
    return float(np.mean([row[figure] for row in rows.values()]))


def train(folder: Path, *overrides: str) -> float:
    """Seconds of one run of the command, in ``folder``; a run that is there is not done again.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    if not (folder / "run.json").is_file() or json.loads((folder / "run.json").read_text())["status"] != "ok":
        command = [sys.executable, str(ROOT / "src" / "train.py"), "workload=restoration", "gpu=cpu"]
        quiet = ["logger=none", "telemetry=none", f"hydra.run.dir={folder}", f"paths.cache_dir={folder.parent}/cache"]
        subprocess.run([*command, *quiet, *overrides], check=True, stdout=subprocess.DEVNULL)
    return float(json.loads((folder / "run.json").read_text())["duration_s"])


def write_fold(folder: Path, trained_on: list[str]) -> int:
    """The photographs of a fold and those without colour as PNG in ``folder``; gives their number."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {name: photograph(name) for name in trained_on}
    images |= {name: read("skimage", f"data/{name}.png") for name in GREY}
    for name, image in images.items():
        Image.fromarray(image).save(folder / f"{name}.png")
    return len(images)


def train_ours(work: Work, overrides: list[str]) -> dict[str, float]:
    """Both trainings and what they restore; gives the seconds of each run."""
    seconds = {"leaves": train(work.folder / "leaves", "seed=1", *overrides)}
    leaves = load_model(work.folder / "leaves", model_args={})
    work.judge("ours, trained on dead leaves", lambda noisy: ours(leaves, noisy))
    names = list(PHOTOGRAPHS)
    for fold in (0, 1):
        data = work.folder / f"photographs_{fold}"
        count = write_fold(data, names[1 - fold :: 2])
        source = [f"workload.data.path={data}", "workload.data.val_frac=0", "workload.data.test_frac=0"]
        crops = f"workload.data.patches_per_image={CROPS_AN_EPOCH // count}"
        seconds[f"fold_{fold}"] = train(work.folder / f"fold_{fold}", "seed=1", *source, crops, *overrides)
        model = load_model(work.folder / f"fold_{fold}", model_args={})
        for number in range(fold, len(names), 2):
            method = "ours, trained on other photographs"
            work.judge_one(method, names[number], number, lambda noisy, model=model: ours(model, noisy))
    return seconds


def difference(rows: dict[str, Any], others: dict[str, Any], figure: str) -> dict[str, Any]:
    """First minus second, paired by photograph."""
    paired = np.array([rows[name][figure] - others[name][figure] for name in PHOTOGRAPHS])
    return {"mean": paired.mean(), "sd": paired.std(ddof=1), "n": len(paired), "ahead_on": int((paired > 0).sum())}


def summary(found: dict[str, Any], best_nlm: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    methods = ["noisy", best_nlm, "bm3d", "ours, trained on dead leaves", "ours, trained on other photographs"]
    results = [
        {"method": name, "n": len(found[name])}
        | {f"{figure}_{unit}": mean(found[name], figure) for figure, unit in (("psnr", "db"), ("ssim", "frac"))}
        | {"seconds_an_image": mean(found[name], "seconds")}
        for name in methods
    ]
    ahead = {
        f"{one} minus {other}": {figure: difference(found[one], found[other], figure) for figure in ("psnr", "ssim")}
        for one in methods[3:]
        for other in methods[1:3]
    }
    return results, ahead


def photographs(work: Path, name: str) -> list[Path]:
    packages, pattern, drawn = SETS[name]
    found = [path for package in packages for path in sorted(debian(work, package).glob(pattern))]
    return [path for path in found if not any(each in str(path) for each in drawn)]


def centre(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    top, left = (pixels.shape[0] - CENTRE) // 2, (pixels.shape[1] - CENTRE) // 2
    return pixels[top : top + CENTRE, left : left + CENTRE]


def mean_psnr(images: list[NDArray[np.uint8]], restore: Callable[[Floats], Floats]) -> list[float]:
    return [figures(restore(noisy_of(number, clean)), clean)["psnr"] for number, clean in enumerate(images)]


def small_set(work: Path, name: str, seeds: int, overrides: list[str]) -> dict[str, Any]:
    """Every third photograph is judged; all figures in dB."""
    files = photographs(work, name)
    judged, trained_on = files[::3], [file for place, file in enumerate(files) if place % 3]
    folder = work / f"{name}-trained-on"
    folder.mkdir(exist_ok=True)
    for place, file in enumerate(trained_on):
        link = folder / f"{place:02}{file.suffix}"
        if not link.is_symlink():
            link.symlink_to(file.resolve())
    known, clean = [centre(file) for file in trained_on[:4]], [centre(file) for file in judged]
    size = {"fast": True, "patch_distance": 6}
    strength = max(
        NLM_STRENGTHS[True],
        key=lambda h: np.mean(mean_psnr(known, lambda noisy: non_local_means(noisy, h=h, **size))),  # type: ignore[arg-type]
    )
    nlm = mean_psnr(clean, lambda noisy: non_local_means(noisy, h=strength, **size))  # type: ignore[arg-type]
    runs = []
    for seed in range(1, seeds + 1):
        run = work / "-".join([f"{name}-run-{seed}", *overrides])
        seconds = train(run, f"workload.data.path={folder}", f"seed={seed}", *overrides)
        model = load_model(run, model_args={})
        record = json.loads((run / "run.json").read_text())
        plan = {knob: one["value"] for knob, one in record["plan"].items() if one["source"] == "data"}
        psnr = mean_psnr(clean, lambda noisy, model=model: ours(model, noisy))
        runs.append({"seed": seed, "psnr_db": psnr, "steps": record["steps"], "seconds": seconds, "derived": plan})
        print(f"{name} seed {seed}: {np.mean(psnr):.2f} dB, non-local means {np.mean(nlm):.2f} dB", flush=True)
    paired = np.mean([run["psnr_db"] for run in runs], 0) - np.array(nlm)
    return {
        "set": name,
        "source": SETS[name][0],
        "trained_on": len(trained_on),
        "judged": [file.name for file in judged],
        "noisy_db": mean_psnr(clean, lambda noisy: noisy),
        "nlm_db": nlm,
        "nlm_strength_chosen_on_training_photographs": strength,
        "default": runs,
        "default_minus_nlm_db": {
            "mean": float(paired.mean()),
            "sd": float(paired.std(ddof=1)),
            "n": len(paired),
            "ahead_on": int((paired > 0).sum()),
        },
    }


def compare_sets(work: Path, names: list[str], seeds: int, overrides: list[str]) -> list[dict[str, Any]]:
    results = [small_set(work, name, seeds, overrides) for name in names]
    print("| set | trained on | judged | noisy | non-local means | default options (seeds, lowest to highest) |")
    print("|---|---|---|---|---|---|")
    for each in results:
        means = [float(np.mean(run["psnr_db"])) for run in each["default"]]
        spread = f"{np.mean(means):.2f} ({min(means):.2f} to {max(means):.2f}, {len(means)})"
        print(
            f"| {each['set']} | {each['trained_on']} | {len(each['judged'])} | {np.mean(each['noisy_db']):.2f} | "
            f"{np.mean(each['nlm_db']):.2f} | {spread} |"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Denoising of photographs, ours beside non-local means and BM3D.")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and figures, kept between calls")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--references-only", action="store_true", help="leave our trainings for another call")
    parser.add_argument("--set", dest="names", help=f"photographs of packages: {', '.join(SETS)}, with commas between")
    parser.add_argument("--seeds", type=int, default=3, help="trainings on each of --set")
    parser.add_argument("overrides", nargs="*", help="of our trainings, such as trainer.max_epochs=10")
    chosen = parser.parse_args()
    if chosen.names:
        chosen.work.mkdir(parents=True, exist_ok=True)
        found = compare_sets(chosen.work.resolve(), chosen.names.split(","), chosen.seeds, chosen.overrides)
        about = {"sigma_of_255": SIGMA, "centre": CENTRE, **packages_used("scikit-image")}
        finish("restoration_small_sets", found, "", chosen.out, config=about)
        return
    work = Work(chosen.work.resolve())
    work.judge("noisy", lambda noisy: noisy)
    best_nlm = tune_non_local_means(work)
    work.judge("bm3d", bm3d)
    if chosen.references_only:
        return
    seconds = train_ours(work, chosen.overrides)
    run = json.loads((work.folder / "leaves" / "run.json").read_text())
    grid = {name: mean(rows, "psnr") for name, rows in work.found.items() if name.startswith("nlm")}
    config = {
        "sigma_of_255": SIGMA,
        "workload": run["config"]["workload"],
        "steps": run["steps"],
        "seconds_of_training": seconds,
        "nlm_grid_psnr_db": grid,
        "nlm_best": best_nlm,
        "folds": [list(PHOTOGRAPHS)[0::2], list(PHOTOGRAPHS)[1::2]],
        **packages_used("scikit-image", "scikit-learn", "bm3d"),
    }
    results, paired = summary(work.found, best_nlm)
    finish("restoration_references", results, says(results), chosen.out, config=config, paired=paired)


def packages_used(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def says(results: list[dict[str, Any]]) -> str:
    levels = ", ".join(f"{row['method']} {row['psnr_db']:.2f} dB" for row in results)
    return f"Mean PSNR of {len(PHOTOGRAPHS)} photographs at a noise of {SIGMA:g}: {levels}."


if __name__ == "__main__":
    main()
