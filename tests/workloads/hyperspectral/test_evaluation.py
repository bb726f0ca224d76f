import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from workloads.hyperspectral.evaluation import BACKGROUND, ClassScores, colour_of

RADIUS = 2
CLASSES = np.array([[0, 0, 1], [1, 2, -1]])
Batch = dict[str, torch.Tensor]


class Told(nn.Module):
    """Its logits are in the batch."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch["logits"]


@pytest.fixture
def batch() -> Batch:
    """All pixels; the second is wrong, and the last has no label."""
    row, column = (torch.from_numpy(each.ravel()) for each in np.mgrid[:2, :3])
    found = torch.tensor([0, 1, 1, 1, 2, 2])
    return {
        "logits": 3 * nn.functional.one_hot(found, 3).float(),
        "label": torch.from_numpy(CLASSES.ravel()),
        "place": row * (3 + 2 * RADIUS) + column,
    }


def scored(*batches: Batch) -> ClassScores:
    found = ClassScores(["7", "8", "9"], CLASSES, RADIUS)
    for each in batches:
        found.update(Told(), each)
    return found


def test_figures_are_as_worked_out_by_hand(batch):
    """4 of 5 are right; the classes have 1/2, 2/2 and 1/1; chance gives (2 x 1 + 2 x 3 + 1 x 1) / 25."""
    figures = scored(batch).compute()
    assert figures["overall_accuracy"] == pytest.approx(0.8)
    assert figures["average_accuracy"] == pytest.approx(2.5 / 3)
    assert figures["kappa"] == pytest.approx((0.8 - 9 / 25) / (1 - 9 / 25))
    labelled = batch["label"] >= 0
    expected = nn.functional.cross_entropy(batch["logits"][labelled], batch["label"][labelled])
    assert figures["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_cutting_a_batch_changes_nothing(batch):
    parts = [{name: values[rows] for name, values in batch.items()} for rows in torch.arange(6).split(2)]
    whole, cut = scored(batch), scored(*parts)
    assert cut.compute() == pytest.approx(whole.compute())
    assert (cut.predicted() == whole.predicted()).all()
    ranks = [scored(parts[0], parts[2]), scored(parts[1])]
    merged = scored()
    merged.merge([each.state() for each in ranks])
    assert merged.compute() == pytest.approx(whole.compute())
    assert (merged.predicted() == whole.predicted()).all()


def test_tables_and_map_are_written(batch, tmp_path: Path):
    files = scored(batch).artifacts(tmp_path)
    assert set(files) == {"per_class", "confusion", "class_map"}
    with files["per_class"].open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[1:] == [
        ["7", "2", "0.5000", "1.0000", "0.6667"],
        ["8", "2", "1.0000", "0.6667", "0.8000"],
        ["9", "1", "1.0000", "1.0000", "1.0000"],
    ]
    assert files["confusion"].read_text().splitlines()[1] == "7,1,1,0"
    with Image.open(files["class_map"]) as picture:
        factor = math.ceil(256 / 3)
        truth, found = (
            [[picture.getpixel((start + x * factor + 1, y * factor + 1)) for x in range(3)] for y in range(2)]
            for start in (0, 3 * factor + 8)
        )
    colours = [colour_of(number) for number in range(3)]
    assert truth == [[colours[0], colours[0], colours[1]], [colours[1], colours[2], BACKGROUND]]
    assert found == [[colours[0], colours[1], colours[1]], [colours[1], colours[2], colours[2]]]
