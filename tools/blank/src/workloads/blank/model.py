"""A small network that predicts one number: a toy to replace by a model of your own."""

from __future__ import annotations

from torch import Tensor, nn

from wellfed.contract import LossOutput


class Regressor(nn.Module):
    """Two hidden layers over ``num_features`` inputs."""

    def __init__(self, num_features: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions ``[batch]`` for inputs ``[batch, num_features]``."""
        outputs: Tensor = self.layers(inputs)
        return outputs.squeeze(-1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> LossOutput:
        """Mean squared error; what else is worth watching goes into ``metrics``."""
        inputs, targets = batch
        error = self(inputs) - targets
        return LossOutput(error.square().mean(), metrics={"mae": error.abs().mean()})
