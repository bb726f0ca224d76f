"""What a guest's run knows of its loaders before Lightning reads them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from wellfed.config.schema import RunConfig
from wellfed.run.objects.guests import batches_per_epoch

ROWS = TensorDataset(torch.zeros(96))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def shared(**more: Any) -> DataLoader[Any]:
    return DataLoader(ROWS, 4, sampler=DistributedSampler(ROWS, num_replicas=2, rank=0), **more)


@pytest.mark.parametrize(
    ("loader", "asked", "expected"),
    [
        (DataLoader(ROWS, 4), {}, 24),
        (DataLoader(ROWS, 4), {"devices": 2}, 12),
        (shared(), {"devices": 2}, 12),
        (DataLoader(ROWS, 4), {"devices": 2, "lightning": {"use_distributed_sampler": False}}, 24),
        (DataLoader(ROWS, 4), {"limit_batches": 5}, 5),
        (DataLoader(ROWS, 4), {"lightning": {"limit_train_batches": 7}}, 7),
        (DataLoader(ROWS, 4), {"lightning": {"overfit_batches": 2}}, 2),
        (DataLoader(ROWS, 4), {"lightning": {"limit_train_batches": 0.25}}, 6),
        (shared(), {"devices": 2, "lightning": {"limit_train_batches": 0.5}}, 6),
        (range(30), {"devices": 2, "lightning": {"limit_train_batches": 10}}, 10),  # the engine's, which shares out
        (DataLoader(Stream(), 4), {}, None),
        (None, {}, None),
    ],
)
def test_the_length_of_an_epoch_is_that_of_lightnings_trainer(
    loader: Any, asked: dict[str, Any], expected: int | None
) -> None:
    config = RunConfig()
    assert batches_per_epoch(replace(config, trainer=replace(config.trainer, **asked)), loader) == expected
