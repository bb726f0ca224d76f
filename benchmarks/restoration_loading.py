"""Patches of images: the per-sample pipeline, our fetch, and our loader.

    python benchmarks/restoration_loading.py [--rounds 7] [--out RECORD]

48 images of 256 x 256 pixels (dead leaves), decoded, in a mapped file. What a step wants is clean and noisy patches,
float32 in 0..1: a crop at a random place, mirrored at random, with Gaussian noise of sigma 25 / 255.

- per sample: a Dataset that does all of that for one patch on the CPU with torch, torch's default collate, DataLoader
  without workers and with two; a ratio is to the faster of them.
- crops alone: what a GPU would be sent, uint8 crops turned at random: numpy in `__getitem__`, Pillow, albumentations,
  each in a DataLoader without workers.
- fetch: `CropData.fetch` alone, for each `memory.features`; in `cache` it names the lines of a crop and copies none.
- loader: `train_loader` over it, with all that a run has, in mode `dynamic`: crops as uint8.
- with on_device: the same and `on_device` on this CPU, which a GPU would do: what is left of the gain without one.

Every round times all of them once, in turns, so that a noisy machine disturbs all alike; a ratio is of one round. One
torch thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.loader import rate  # noqa: E402
from benchmarks.measuring import compared, finish, has, interval, ratios, turned  # noqa: E402
from wellfed.contract import FEATURE_MODES  # noqa: E402
from wellfed.data.settings import LoaderSettings  # noqa: E402
from wellfed.data.train_loader import train_loader  # noqa: E402
from wellfed.sample_rng import SampleRng  # noqa: E402
from workloads.restoration.crops import CropData  # noqa: E402
from workloads.restoration.decoding import Decoded  # noqa: E402
from workloads.restoration.degradations import Degradation  # noqa: E402
from workloads.restoration.images import PIXELS_FILE, ImagePixels, read_index, write_images  # noqa: E402
from workloads.restoration.synthetic import dead_leaves  # noqa: E402

IMAGES, SIDE, PATCHES_PER_IMAGE, SIGMA = 48, 256, 4000, 25.0
SHAPES = ((64, 16), (128, 16), (64, 64))
"""Patch and batch."""
LOADERS = {
    "inline": LoaderSettings(),
    "threads": LoaderSettings("threads", num_workers=1, prefetch_factor=8),
    "processes": LoaderSettings("processes", num_workers=1, prefetch_factor=8, persistent_workers=True),
}
WORKERS = (0, 2)
"""Worker processes of a peer; the faster of both counts, in each round."""
PER_SAMPLE = {f"per sample, {n} workers": n for n in WORKERS}


class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """One noisy and clean patch at a time, all on the CPU."""

    def __init__(self, images: list[Tensor], patch: int) -> None:
        self.images, self.patch = images, patch

    def __len__(self) -> int:
        return len(self.images) * PATCHES_PER_IMAGE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index // PATCHES_PER_IMAGE]
        y, x = (int(torch.randint(side - self.patch + 1, ())) for side in image.shape[:2])
        crop = image[y : y + self.patch, x : x + self.patch]
        clean = crop.permute(2, 0, 1).float() / 255
        for dimension in (1, 2):
            if torch.rand(()) < 0.5:
                clean = clean.flip(dimension)
        clean = clean.contiguous()
        noisy = (clean + torch.randn_like(clean) * (SIGMA / 255)).clamp_(0, 1)
        return noisy, clean


class Crops(Dataset[np.ndarray[Any, Any]]):
    """One uint8 crop at a time, mirrored at random."""

    def __init__(self, images: list[Tensor], patch: int) -> None:
        self.images, self.patch = [image.numpy() for image in images], patch

    def __len__(self) -> int:
        return len(self.images) * PATCHES_PER_IMAGE

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(self.cut(self.images[index // PATCHES_PER_IMAGE]))

    def cut(self, image: Any) -> np.ndarray[Any, Any]:
        y, x = (np.random.randint(side - self.patch + 1) for side in image.shape[:2])
        crop = image[y : y + self.patch, x : x + self.patch]
        if np.random.rand() < 0.5:
            crop = crop[::-1]
        return crop[:, ::-1] if np.random.rand() < 0.5 else crop


class PillowCrops(Crops):
    def __init__(self, images: list[Tensor], patch: int) -> None:
        from PIL import Image

        super().__init__(images, patch)
        self.images = [Image.fromarray(image) for image in self.images]

    def cut(self, image: Any) -> np.ndarray[Any, Any]:
        from PIL import Image

        y, x = (np.random.randint(side - self.patch + 1) for side in (image.height, image.width))
        crop = image.crop((x, y, x + self.patch, y + self.patch))
        for turn in (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM):
            if np.random.rand() < 0.5:
                crop = crop.transpose(turn)
        return np.asarray(crop)


class AlbumentationsCrops(Crops):
    def __init__(self, images: list[Tensor], patch: int) -> None:
        import albumentations

        super().__init__(images, patch)
        steps = [
            albumentations.RandomCrop(patch, patch),
            albumentations.HorizontalFlip(),
            albumentations.VerticalFlip(),
        ]
        self.transform = albumentations.Compose(steps)

    def cut(self, image: Any) -> np.ndarray[Any, Any]:
        return self.transform(image=image)["image"]


CROPS = {
    "numpy in `__getitem__`": ("numpy", Crops),
    "Pillow": ("PIL", PillowCrops),
    "albumentations": ("albumentations", AlbumentationsCrops),
}
"""Peers of crops alone: package and data set."""


def cropped(data: Crops, batch: int, workers: int) -> Iterator[Any]:
    return iter(DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers))


def per_sample(images: list[Tensor], patch: int, batch: int, workers: int) -> Iterator[Any]:
    return iter(DataLoader(PerSample(images, patch), batch_size=batch, shuffle=True, num_workers=workers))


def fetched(data: CropData, batch: int) -> Iterator[Any]:
    for number, indices in enumerate(torch.randperm(len(data)).split(batch)):
        yield data.fetch(indices, SampleRng(0, 0, number))


def loaded(data: CropData, batch: int, settings: LoaderSettings, *, on_device: bool = False) -> Iterator[Any]:
    with closing(train_loader(data, batch_size=batch, seed=0, settings=settings)) as loader:
        for number, delivery in enumerate(loader):
            yield data.on_device(delivery.batch, SampleRng(0, 0, number)) if on_device else delivery


def variants(pixels: ImagePixels, images: Any, patch: int, batch: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Returns the timed variants by name."""
    data = CropData(
        pixels, images, patch_size=patch, patches_per_image=PATCHES_PER_IMAGE, degrade=Degradation(sigma=SIGMA)
    )
    held = [torch.from_numpy(pixels.image(image).copy()) for image in images]
    of_mode = {mode: data.for_features(mode) for mode in FEATURE_MODES}
    return {
        **{name: lambda n=n: per_sample(held, patch, batch, n) for name, n in PER_SAMPLE.items()},
        **{
            f"{name}, {n} workers": lambda kind=kind, n=n: cropped(kind(held, patch), batch, n)
            for name, (package, kind) in CROPS.items()
            for n in WORKERS
            if has(package)
        },
        **{f"fetch, {mode}": lambda each=each: fetched(each, batch) for mode, each in of_mode.items()},
        **{f"loader, {name}": lambda plan=plan: loaded(data, batch, plan) for name, plan in LOADERS.items()},
        "loader, threads, with on_device": lambda: loaded(data, batch, LOADERS["threads"], on_device=True),
    }


def measure(timed: dict[str, Callable[[], Iterator[Any]]], batch: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Patches/s of each, one a round, each over about so many seconds; the first round is dropped."""
    raw: dict[str, list[float]] = {name: [] for name in timed}
    num = dict.fromkeys(timed, 5)
    most = IMAGES * PATCHES_PER_IMAGE // batch - 2
    for number in range(rounds + 1):
        for name in turned(timed, number):
            found = rate(timed[name](), batch, num[name])
            num[name] = max(5, min(round(seconds * found / batch), most))
            if number:
                raw[name].append(found)
    return raw


def faster(raw: dict[str, list[float]], name: str) -> list[float] | None:
    """Patches/s of a peer by the faster number of workers, one a round; None if it can't be imported."""
    with_workers = [raw[key] for n in WORKERS if (key := f"{name}, {n} workers") in raw]
    return [max(each) for each in zip(*with_workers, strict=True)] or None


def summaries(raw: dict[str, list[float]], patch: int, batch: int) -> list[dict[str, Any]]:
    """One a variant; ratios are to the faster of the two per-sample pipelines of the same round."""
    best = [max(pair) for pair in zip(*(raw[name] for name in PER_SAMPLE), strict=True)]
    found = []
    for name, rates in raw.items():
        of_one = ratios({"mine": rates, "best": best}, "mine", "best")
        found.append(
            {
                "variant": name,
                "patch": patch,
                "batch": batch,
                "n": len(rates),
                "patches_per_s_mean": statistics.fmean(rates),
                "patches_per_s_sd": statistics.stdev(rates),
                "ratio_to_per_sample_median": statistics.median(of_one),
                "ratio_to_per_sample_ci95": interval(of_one),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one variant in one round")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        drawn = enumerate(dead_leaves(IMAGES, SIDE, 0))
        write_images(Path(folder), ((str(number), "train", Decoded(image, ())) for number, image in drawn))
        images = read_index(Path(folder)).images
        pixels = ImagePixels(Path(folder) / PIXELS_FILE, images[-1].end)
        for patch, batch in SHAPES:
            found = measure(variants(pixels, images, patch, batch), batch, chosen.rounds, chosen.seconds)
            whole = found["loader, threads, with on_device"]
            best = [max(pair) for pair in zip(*(found[name] for name in PER_SAMPLE), strict=True)]
            what = f"{batch} patches of {patch} pixels"
            rows += compared(f"{what}, noise added", "patches/s", whole, {"DataLoader over samples": best})
            crops = [max(each) for each in zip(*(found[f"loader, {name}"] for name in LOADERS), strict=True)]
            rows += compared(f"{what}, crops alone", "patches/s", crops, {name: faster(found, name) for name in CROPS})
            for each in summaries(found, patch, batch):
                results.append(each)
                rate_of, (low, high) = f"{each['patches_per_s_mean']:,.0f} patches/s", each["ratio_to_per_sample_ci95"]
                times = f"{each['ratio_to_per_sample_median']:.1f} ({low:.1f} to {high:.1f}) times per sample"
                print(f"patch {patch}, batch {batch}: {each['variant']:<32} {rate_of:>18}, {times}")

    def ratio(variant: str, patch: int, batch: int) -> float:
        where = {"variant": variant, "patch": patch, "batch": batch}
        return next(each["ratio_to_per_sample_median"] for each in results if where.items() <= each.items())

    says = "; ".join(
        f"patch {patch}, batch {batch}: fetch {ratio('fetch, dynamic', patch, batch):.0f}, loader "
        f"{max(ratio(f'loader, {name}', patch, batch) for name in LOADERS):.0f}, with on_device on one core "
        f"{ratio('loader, threads, with on_device', patch, batch):.1f} times the per-sample pipeline"
        for patch, batch in SHAPES
    )
    config = {
        "images": IMAGES,
        "side": SIDE,
        "shapes": SHAPES,
        "sigma": SIGMA,
        "threads": 1,
        "loaders": {name: vars(plan) for name, plan in LOADERS.items()},
    }
    finish("restoration_loading", results, f"{says}.", chosen.out, config=config, compared=rows)


if __name__ == "__main__":
    main()
