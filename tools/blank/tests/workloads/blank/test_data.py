from __future__ import annotations

import pytest
import torch

from wellfed.errors import ConfigError
from wellfed.sample_rng import SampleRng
from workloads.blank.data import Points, datasets


def test_a_batch_is_its_points():
    data = Points(20, noise=0.1, seed=0)
    inputs, targets = data.fetch(torch.tensor([3, 17]), SampleRng(1, 0, 0))
    for row, index in enumerate((3, 17)):
        assert torch.equal(inputs[row], data[index][0])
        assert torch.equal(targets[row], data[index][1])


def test_splits_are_repeatable_and_share_no_point():
    first, again = datasets(100), datasets(100)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert (len(first.train), len(first.val), len(first.test)) == (100, 10, 10)
    rows = torch.cat([first.train.inputs, first.val.inputs, first.test.inputs])
    assert len(rows.unique(dim=0)) == 120


def test_too_few_points_are_told():
    with pytest.raises(ConfigError, match=r"9 is less than 10"):
        datasets(9)
