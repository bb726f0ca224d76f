import os
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from wellfed import generators
from wellfed.generators import seed_everything
from wellfed.sample_rng import SampleRng

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


class Drawing:
    """Draws from generators of its own, as datasets do."""

    def __init__(self):
        self.numpy, self.old = np.random.default_rng(1), np.random.RandomState(2)
        self.nested = {"torch": [torch.Generator().manual_seed(3)], "python": (random.Random(4),)}
        self.itself = self

    def draw(self):
        python, torchs = self.nested["python"][0], self.nested["torch"][0]
        return self.numpy.random(), self.old.rand(), python.random(), torch.rand(1, generator=torchs).item()


def test_generators_that_an_object_holds_are_put_back_too():
    inner = Drawing()
    outer = torch.utils.data.Subset(inner, [0])
    with generators.kept(outer):
        first = inner.draw()
        assert inner.draw() != first
    assert inner.draw() == first


def test_a_large_object_is_not_searched_to_its_end():
    holder = Drawing()
    holder.rows = list(range(10**6, 3 * 10**6))
    assert len(generators.held_by(holder)) == 4


def test_held_generators_are_seeded_alike_each_time_and_differently_from_each_other():
    def drawn(seed):
        held = [np.random.default_rng(), np.random.default_rng(), np.random.Generator(np.random.Philox())]
        held += [random.Random(), np.random.RandomState(), torch.Generator()]
        generators.seed_held(held, seed)
        return [draws(one) for one in held]

    def draws(generator):
        if isinstance(generator, torch.Generator):
            return torch.rand(500, generator=generator, dtype=torch.float64).tolist()
        one = generator.rand if isinstance(generator, np.random.RandomState) else generator.random
        return [one() for _ in range(500)]

    assert drawn(7) == drawn(7)
    values = np.array([each for seed in range(4) for each in drawn(seed)])
    assert np.abs(np.corrcoef(values) - np.eye(len(values))).max() < 0.25
    assert np.abs(values[:, :4].mean(0) - 0.5).max() < 0.25


def test_generators_that_can_not_be_seeded_are_left_alone():
    holder = Drawing()
    holder.system = random.SystemRandom()
    holder.of_batch = SampleRng(1, 0)
    assert len(generators.held_by(holder)) == 4
