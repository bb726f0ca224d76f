import os
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from wellfed import generators
from wellfed.generators import seed_everything

VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def drawn(seed_by, seed, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    seed_by(seed)
    told = [os.environ[name] for name in VARIABLES]
    return random.random(), np.random.rand(), torch.rand(1).item(), told


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_seeds_are_lightnings(seed, monkeypatch):
    lightnings = drawn(lambda number: pl.seed_everything(number, verbose=False), seed, monkeypatch)
    assert drawn(seed_everything, seed, monkeypatch) == lightnings


def test_a_seed_beyond_numpys_range_is_wrapped(monkeypatch):
    assert drawn(seed_everything, 2**32 + 7, monkeypatch) == drawn(seed_everything, 7, monkeypatch)


def draws():
    return torch.rand(2).tolist(), np.random.rand(), random.random()


def test_what_is_drawn_within_changes_nothing_after():
    torch.manual_seed(1)
    with generators.kept():
        first = draws()
    with generators.kept():
        assert draws() == first
    assert draws() == first
