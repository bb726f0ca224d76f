"""Points of a known function, with noise: a toy to replace by data of your own."""

from __future__ import annotations

import torch
from torch import Tensor

from wellfed.contract import Datasets
from wellfed.errors import ConfigError, Fault
from wellfed.sample_rng import SampleRng

NUM_FEATURES = 8


class Points:
    """Inputs and targets in memory; no model can predict the noise, so its variance is the lowest loss there is."""

    def __init__(self, num_points: int, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.rand(num_points, NUM_FEATURES, generator=generator)
        self.targets = self.inputs.sin().sum(1) + noise * torch.randn(num_points, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def fetch(self, indices: Tensor, rng: SampleRng) -> tuple[Tensor, Tensor]:
        """A whole batch at once spares collating single points; ``rng`` is there for random augmentation."""
        return self.inputs[indices], self.targets[indices]


def datasets(num_points: int, noise: float = 0.1) -> Datasets:
    """Training, validation and test points, and what the model must know of them.

    Args:
        num_points: of the training split; the other two have a tenth of it each.
        noise: standard deviation of what is added to the targets.

    Raises:
        ConfigError: fewer than 10 points.
    """
    if num_points < 10:
        raise ConfigError([Fault("workload.data.num_points", f"{num_points} is less than 10.", "Write 20000 or so.")])
    return Datasets(
        train=Points(num_points, noise, seed=0),
        val=Points(num_points // 10, noise, seed=1),
        test=Points(num_points // 10, noise, seed=2),
        model_args={"num_features": NUM_FEATURES},
    )
