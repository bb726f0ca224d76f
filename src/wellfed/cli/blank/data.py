"""Draws rows of numbers, each with a class: points around four centres."""

from __future__ import annotations

import torch
from torch import Tensor

from wellfed import ConfigError, Datasets, SampleRng
from wellfed.units import counted, show_percent

MIN_ROWS = 10
"""Minimum number of rows, so that validation and test have at least one each."""


class Rows:
    """Inputs ``[rows, columns]`` and classes ``[rows]``, in memory."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        """Returns a whole batch at once. Optional: faster than collating samples; draw random numbers from ``rng``."""
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


def datasets(num_rows: int = 10_000) -> Datasets:
    """Splits the rows: a tenth for validation, a tenth for the test, the others for training.

    Raises:
        ConfigError: ``num_rows`` is too small.
    """
    inputs, labels = drawn(num_rows)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same split in each run
    test, val, train = order.tensor_split([len(order) // 10, len(order) // 5])
    spread = inputs[train].std(0)
    inputs = ((inputs - inputs[train].mean(0)) / torch.where(spread > 0, spread, 1)).float()
    num_classes = int(labels.max()) + 1
    commonest = show_percent(float(labels.bincount().max()) / len(labels))
    return Datasets(
        train=Rows(inputs[train], labels[train]),
        val=Rows(inputs[val], labels[val]),
        test=Rows(inputs[test], labels[test]),
        model_args={"num_inputs": inputs.shape[1], "num_classes": num_classes},
        notes=(f"{counted(len(labels), 'row')} of {num_classes} classes; {commonest} are of the commonest",),
    )


def drawn(num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns points around four centres. The clouds overlap, so no model classifies all of them correctly."""
    if num_rows < MIN_ROWS:
        problem = f"are fewer than the {MIN_ROWS} that three splits need."
        raise ConfigError.of(f"workload.data.num_rows={num_rows}", problem, "Write num_rows=10000 or so.")
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 8, generator=generator)
    labels = torch.randint(4, (num_rows,), generator=generator)
    return centres[labels] + torch.randn(num_rows, 8, generator=generator), labels
