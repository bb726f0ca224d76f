"""Counts confusions of classes: accuracy, a table of the classes and the confusion matrix.

Shapes: B clips, K classes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wellfed import FeatureSource
from wellfed.data.shards.class_folders import SPLITS

Floats = NDArray[np.float64]


class SpokenWords:
    """Accuracy over the clips, and as a mean over the classes; counts stay on the device until ``compute``."""

    best_metric = "accuracy"
    best_mode: Literal["max", "min"] = "max"

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.reset()

    def reset(self) -> None:
        """Clears all counts."""
        self._count_KK: Tensor | None = None
        self._split: Tensor | None = None

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Tensor], /, *features: FeatureSource) -> None:
        """Classifies a batch from ``on_device``: ``log_mel`` [B, M, T], ``label`` and ``split`` [B]; padded clips have
        ``is_sound`` [B, T]."""
        label_B = batch["label"]
        inputs = [batch[name] for name in ("log_mel", "is_sound") if name in batch]
        found_B = cast(Tensor, model(*inputs)).argmax(1)
        if self._count_KK is None:
            self._count_KK = torch.zeros(len(self.classes) ** 2, dtype=torch.int64, device=label_B.device)
            self._split = batch["split"][:1]
        pair_B = label_B * len(self.classes) + found_B
        self._count_KK = self._count_KK.scatter_add(0, pair_B, torch.ones_like(pair_B))

    def state(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the counts and their split."""
        return self._count_KK, self._split

    def merge(self, states: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Adds the counts of all ranks."""
        counts = [count for count, _ in states if count is not None]
        self._count_KK = torch.stack(counts).sum(0) if counts else None
        self._split = next((split for _, split in states if split is not None), None)

    def compute(self) -> dict[str, float]:
        """Returns ``accuracy`` and ``balanced_accuracy``; NaN without clips."""
        count_KK = self._counts()
        total, right_K, of_class_K = count_KK.sum(), count_KK.diagonal(), count_KK.sum(1)
        seen = of_class_K > 0
        return {
            "accuracy": float(right_K.sum() / total) if total else float("nan"),
            "balanced_accuracy": float((right_K[seen] / of_class_K[seen]).mean()) if total else float("nan"),
        }

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Writes ``confusion_<split>.csv``, with true classes as rows and predicted ones as columns, and
        ``classes_<split>.csv`` with clips, recall, precision and F1 of each class."""
        count_KK = self._counts()
        if not count_KK.sum():
            return {}
        assert self._split is not None
        split = SPLITS[int(self._split)]
        confusion = [["class", *self.classes]]
        confusion += [[name, *map(str, row)] for name, row in zip(self.classes, count_KK.astype(int), strict=True)]
        tables = {f"confusion_{split}": confusion, f"classes_{split}": self._per_class(count_KK)}
        paths = {name: folder / f"{name}.csv" for name in tables}
        for name, rows in tables.items():
            with paths[name].open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
        return paths

    def _per_class(self, count_KK: Floats) -> list[list[str]]:
        rows = [["class", "clips", "recall", "precision", "f1"]]
        for place, name in enumerate(self.classes):
            right, clips, taken = count_KK[place, place], count_KK[place].sum(), count_KK[:, place].sum()
            shares = [(right, clips), (right, taken), (2 * right, clips + taken)]
            rows.append([name, f"{clips:.0f}", *(f"{part / of:.4f}" if of else "" for part, of in shares)])
        return rows

    def _counts(self) -> Floats:
        """Returns the counts [K, K], true by predicted class, with one transfer from the device."""
        size = len(self.classes)
        if self._count_KK is None:
            return np.zeros((size, size))
        return self._count_KK.view(size, size).cpu().numpy().astype(np.float64)
