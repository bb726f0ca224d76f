"""Gradients of ranks with uneven shares, without DDP: here one rank that has a share of each step."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import tiny
from wellfed.train.lightning.user_module.rank_shares import RankShares

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class ShareOfSteps:
    """Batches as those of a rank that has half of each step's samples, or none."""

    def __init__(self, **changes: Any) -> None:
        self._loader, self._changes = tiny.loader(), changes

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for delivery in self._loader:
            yield replace(delivery, total=2 * delivery.total, **self._changes)


def trained(folder: Path, lr: float, *, batches: Any = None) -> torch.Tensor:
    module = tiny.Lightnings(tiny.module(optimizer=torch.optim.SGD, lr=lr))
    tiny.fit(module, folder, [] if batches is None else [RankShares()], batches=batches, max_steps=4)
    return tiny.weights(module)


def test_a_share_of_a_step_counts_by_its_samples(tmp_path: Path) -> None:
    assert torch.equal(trained(tmp_path, 0.5, batches=ShareOfSteps()), trained(tmp_path, 0.25))


def test_padding_counts_nothing(tmp_path: Path) -> None:
    padding = ShareOfSteps(is_padding=True)
    assert torch.equal(trained(tmp_path, 0.5, batches=padding), trained(tmp_path, 0.0))
