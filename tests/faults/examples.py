"""The example workloads on small data of a user, whose files and caches can be damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
from PIL import Image

from tests.faults.damages import Change
from tests.faults.harness import SHORT, Box
from tests.faults.plants import Plant
from tests.workloads.speech import recordings
from wellfed.data.shards import write_shards


@dataclass(frozen=True)
class Example:
    """A workload on a user's data."""

    workload: str
    write: Callable[[Path], object]
    """Writes the data into a folder."""
    settings: tuple[str, ...] = ()
    path: str = ""
    """File or folder that ``workload.data.path`` names, relative to the folder."""

    def with_damage(self, change: Change) -> Plant:
        """Returns one training on damaged data."""

        def plant_it(box: Box) -> None:
            data = self._written(box)
            change(data)
            self._train(box)

        return plant_it

    def with_damaged_cache(self, change: Change) -> Plant:
        """Returns a training, a change of all files of its cache but locks, and a second training."""

        def plant_it(box: Box) -> None:
            self._written(box)
            self._train(box)
            files = [path for path in (box.folder / ".cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
            assert files
            for path in files:
                if path.stat().st_size:
                    change(path)
            self._train(box)

        return plant_it

    def with_cache(self, folder: str) -> Plant:
        """Returns one training whose cache is in this folder."""

        def plant_it(box: Box) -> None:
            self._written(box)
            self._train(box, f"paths.cache_dir={folder}")

        return plant_it

    def as_shards(self) -> Example:
        """Returns the same data in two shards."""

        def write(folder: Path) -> None:
            self.write(folder / "files")
            write_shards(folder / "files", folder / "shards", num=2)
            for shard in (folder / "shards").iterdir():
                shard.rename(folder / shard.name)
            (folder / "shards").rmdir()
            shutil.rmtree(folder / "files")

        return replace(self, write=write)

    def _written(self, box: Box) -> Path:
        data = box.folder / "data"
        data.mkdir()
        self.write(data)
        return data

    def _train(self, box: Box, *more: str) -> None:
        fixed = (f"workload={self.workload}", f"workload.data.path={box.folder / 'data' / self.path}", *SHORT)
        box.script("train.py", *fixed, "trainer.max_steps=6", *self.settings, *more)


def _images(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    for number in range(24):
        pixels = drawn.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def _series(folder: Path) -> None:
    first = date(2024, 1, 1)
    rows = [f"{first + timedelta(days=day)},{np.sin(day / 7):.4f}" for day in range(400)]
    (folder / "table.csv").write_text("\n".join(["date,value", *rows, ""]))


def _scene(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    labels = np.repeat(np.arange(1, 4), 16)[:, None] * np.ones((1, 48), np.int64)
    np.save(folder / "scene.npy", (drawn.normal(size=(48, 48, 8)) + labels[..., None]).astype(np.float32))
    np.save(folder / "scene_gt.npy", labels.astype(np.int64))


def _ratings(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    rows = [(user, item, drawn.integers(1, 6), 100 + item) for user in range(1, 31) for item in range(1, 21)]
    (folder / "u.data").write_text("".join(f"{user}\t{item}\t{stars}\t{at}\n" for user, item, stars, at in rows))
    (folder / "u.user").write_text("".join(f"{user}|27|F|programmer|55455\n" for user in range(1, 31)))
    flags = "|".join(["0"] * 18 + ["1"])
    (folder / "u.item").write_text("".join(f"{item}|F{item} (1995)|01-Jan-1995||x|{flags}\n" for item in range(1, 21)))


IMAGES = Example(
    "restoration",
    _images,
    ("workload.data.patch_size=16", "workload.model.base_channels=4", "workload.model.num_blocks=1",
     "workload.effective_batch_size=8"),
)  # fmt: skip
SOUNDS = Example(
    "speech",
    lambda folder: recordings.folder(folder, speakers=10),
    ("workload.effective_batch_size=8",),
)
SERIES = Example("forecast", _series, ("workload.effective_batch_size=32",), "table.csv")
SCENES = Example(
    "hyperspectral",
    _scene,
    ("workload.data.patch_size=5", "workload.data.block_size=6", "workload.model.base_channels=4"),
    "scene.npy",
)
RATINGS = Example("recsys", _ratings, ("workload.effective_batch_size=64",))
