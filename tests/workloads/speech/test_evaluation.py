import csv

import pytest
import torch
from torch import nn

from workloads.speech.evaluation import SpokenWords


class Scores(nn.Module):
    """What the batch says."""

    def forward(self, scores):
        return scores


def batch(labels, found, split=2):
    label = torch.tensor(labels)
    scores = nn.functional.one_hot(torch.tensor(found), 3).float()
    return {"label": label, "log_mel": scores, "split": torch.full_like(label, split)}


def test_counts_and_tables(tmp_path):
    words = SpokenWords(["no", "yes", "up"])
    words.update(Scores(), batch([0, 0, 1], [0, 1, 1]))
    words.update(Scores(), batch([0], [0]))
    assert words.compute() == {"accuracy": 0.75, "balanced_accuracy": pytest.approx((2 / 3 + 1) / 2)}
    paths = words.artifacts(tmp_path)
    assert list(paths) == ["confusion_test", "classes_test"]
    with paths["confusion_test"].open() as file:
        assert list(csv.reader(file)) == [
            ["class", "no", "yes", "up"], ["no", "2", "1", "0"], ["yes", "0", "1", "0"], ["up", "0", "0", "0"],
        ]  # fmt: skip
    with paths["classes_test"].open() as file:
        table = list(csv.reader(file))
    assert table[1] == ["no", "3", "0.6667", "1.0000", "0.8000"]
    assert table[3] == ["up", "0", "", "", ""]


def test_ranks_together_are_one():
    one, *ranks = (SpokenWords(["a", "b", "c"]) for _ in range(4))
    parts = [batch([0, 1], [0, 2]), batch([2], [2])]
    for part, rank in zip(parts, ranks, strict=False):
        one.update(Scores(), part)
        rank.update(Scores(), part)
    ranks[0].merge([rank.state() for rank in ranks])
    assert ranks[0].compute() == one.compute()
