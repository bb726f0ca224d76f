"""Scores classified pixels: overall and average accuracy, Cohen's kappa, a table of classes and a map of the scene.

Shapes: B pixels of a batch, K classes, H x W the scene.
"""

from __future__ import annotations

import colorsys
import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from wellfed import FeatureSource

SMALLEST_SIDE = 256
"""Minimum side of the map in pixels; small scenes are enlarged by a whole factor."""
MARGIN, SWATCH, LEGEND_ENTRY = 8, 12, 64
BACKGROUND = (0, 0, 0)

State = tuple[Tensor | None, list[Tensor]]


class ClassScores:
    """Accuracy over the labelled pixels; unlabelled ones only appear on the map. Predictions stay on the device until
    ``compute``.

    ``overall_accuracy`` is the share of correct pixels, ``average_accuracy`` the mean of this share over classes.
    ``kappa`` is the overall accuracy corrected for chance, and ``loss`` the cross-entropy.

    Args:
        class_HW: ground truth, -1 for background.
        radius: radius of the patches, the margin of the padded scene.
    """

    best_metric = "average_accuracy"
    """Average accuracy, because blocks of ground give validation and test different shares of the classes."""
    best_mode: Literal["max", "min"] = "max"
    with_loss = False
    """False, since the loss is computed here over labelled pixels alone."""

    def __init__(self, names: Sequence[str], class_HW: NDArray[np.int64], radius: int) -> None:
        self.names, self.class_HW, self.radius = list(names), class_HW, radius
        self.reset()

    def reset(self) -> None:
        """Clears all pixels."""
        self._sums: Tensor | None = None
        self._seen: list[Tensor] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Tensor], /, *features: FeatureSource) -> None:
        """Classifies the pixels of a batch from ``on_device``: ``patch``, ``label`` (-1 = none), ``place``."""
        logits, label_B = model(batch).double(), batch["label"]
        found_B = logits.argmax(1)
        count, known_B = len(self.names), (label_B >= 0).double()
        label_B = label_B.clamp(min=0)
        loss_B = logits.logsumexp(1) - logits.gather(1, label_B[:, None]).squeeze(1)
        if self._sums is None:
            self._sums = torch.zeros(count * count + 1, dtype=torch.float64, device=logits.device)
        self._sums[:-1].index_add_(0, label_B * count + found_B, known_B)
        self._sums[-1] += (loss_B * known_B).sum()
        self._seen.append(torch.stack([batch["place"], found_B]))

    def state(self) -> State:
        """Returns the confusion matrix followed by the summed loss, and places and predictions [2, B] of each batch."""
        return self._sums, self._seen

    def merge(self, states: Sequence[State]) -> None:
        """Replaces the state by those of all ranks, in the order of the split."""
        sums = [each for each, _ in states if each is not None]
        self._sums = torch.stack(sums).sum(0) if sums else None
        in_turn = itertools.zip_longest(*(seen for _, seen in states))
        self._seen = [each for batches in in_turn for each in batches if each is not None]

    def compute(self) -> dict[str, float]:
        """Returns the metrics over all labelled pixels since `reset`; NaN without pixels."""
        confusion_KK, loss = self._confusion()
        return scores_of(confusion_KK) | {"loss": loss / total if (total := confusion_KK.sum()) else math.nan}

    def _confusion(self) -> tuple[NDArray[np.float64], float]:
        """Returns the confusion matrix with the truth as rows, and the summed loss."""
        count = len(self.names)
        if self._sums is None:
            return np.zeros((count, count)), math.nan
        sums = self._sums.cpu().numpy()
        return sums[:-1].reshape(count, count), float(sums[-1])

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Writes ``per_class.csv``, ``confusion.csv`` (rows are the truth) and ``class_map.png``."""
        confusion_KK, _ = self._confusion()
        if not self._seen:
            return {}
        rows: dict[str, list[list[Any]]] = {
            "per_class": [
                ["class", "pixels", "recall", "precision", "f1"],
                *([name, *row] for name, row in zip(self.names, per_class(confusion_KK), strict=True)),
            ],
            "confusion": [
                ["class", *self.names],
                *([name, *row] for name, row in zip(self.names, confusion_KK.astype(int).tolist(), strict=True)),
            ],
        }
        found = {}
        for name, table in rows.items():
            found[name] = folder / f"{name}.csv"
            with found[name].open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(table)
        found["class_map"] = folder / "class_map.png"
        draw_maps([self.class_HW, self.predicted()], self.names).save(found["class_map"])
        return found

    def predicted(self) -> NDArray[np.int64]:
        """Returns the predicted class of each pixel [H, W], -1 without a prediction."""
        found_HW = np.full(self.class_HW.shape, -1)
        if self._seen:
            place, found = torch.cat(self._seen, 1).cpu().numpy()
            row, column = np.divmod(place, self.class_HW.shape[1] + 2 * self.radius)
            found_HW[row, column] = found
        return found_HW


def scores_of(confusion_KK: NDArray[np.float64]) -> dict[str, float]:
    """Returns overall accuracy, mean recall of the occurring classes, and kappa; NaN without pixels."""
    total = confusion_KK.sum()
    if total == 0:
        return dict.fromkeys(("overall_accuracy", "average_accuracy", "kappa"), math.nan)
    truth_K, found_K, right_K = confusion_KK.sum(1), confusion_KK.sum(0), confusion_KK.diagonal()
    overall = float(right_K.sum() / total)
    chance = float((truth_K * found_K).sum() / total**2)
    return {
        "overall_accuracy": overall,
        "average_accuracy": float((right_K[truth_K > 0] / truth_K[truth_K > 0]).mean()),
        "kappa": (overall - chance) / (1 - chance) if chance < 1 else 0.0,
    }


def per_class(confusion_KK: NDArray[np.float64]) -> list[list[Any]]:
    """Returns pixels, recall, precision and F1 of each class; empty if the divisor is 0."""
    rows = []
    for truth, found, right in zip(confusion_KK.sum(1), confusion_KK.sum(0), confusion_KK.diagonal(), strict=True):
        shares = [
            f"{part / whole:.4f}" if whole else ""
            for part, whole in ((right, truth), (right, found), (2 * right, truth + found))
        ]
        rows.append([int(truth), *shares])
    return rows


def draw_maps(maps: Sequence[NDArray[np.int64]], names: Sequence[str]) -> Image.Image:
    """Draws maps of classes [H, W] side by side, with a legend below."""
    colours = np.array([colour_of(number) for number in range(len(names))] + [BACKGROUND], dtype=np.uint8)
    height, width = maps[0].shape
    factor = max(1, math.ceil(SMALLEST_SIDE / max(height, width)))
    panels = [colours[each].repeat(factor, 0).repeat(factor, 1) for each in maps]
    beside = len(maps) * width * factor + (len(maps) - 1) * MARGIN
    across = max(beside, LEGEND_ENTRY)
    per_line = max(1, across // LEGEND_ENTRY)
    lines = math.ceil(len(names) / per_line)
    picture = Image.new("RGB", (across, height * factor + 2 * MARGIN + lines * (SWATCH + MARGIN)), (255, 255, 255))
    for number, panel in enumerate(panels):
        picture.paste(Image.fromarray(panel), (number * (width * factor + MARGIN), 0))
    pen = ImageDraw.Draw(picture)
    for number, name in enumerate(names):
        line, place = divmod(number, per_line)
        left, top = place * LEGEND_ENTRY + MARGIN // 2, height * factor + MARGIN + line * (SWATCH + MARGIN)
        pen.rectangle((left, top, left + SWATCH, top + SWATCH), fill=colour_of(number))
        pen.text((left + SWATCH + 4, top), name, fill=(0, 0, 0))
    return picture


def colour_of(number: int) -> tuple[int, int, int]:
    """Returns a colour that differs from earlier ones: hues by the golden section, three brightnesses."""
    red, green, blue = colorsys.hsv_to_rgb(
        number * 0.618034 % 1, (0.85, 0.55)[number % 2], (1.0, 0.75, 0.9)[number % 3]
    )
    return round(255 * red), round(255 * green), round(255 * blue)
