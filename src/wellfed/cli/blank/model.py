"""Predicts the class of a row of numbers with two layers and a cross-entropy."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellfed import LossOutput


class Network(nn.Module):
    """Two layers that give a score for each class.

    Args:
        num_inputs: columns; the data passes it and ``num_classes`` (`Datasets.model_args`).
        hidden: width of the hidden layer.
    """

    def __init__(self, num_inputs: int, num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns scores ``[batch, classes]`` for inputs ``[batch, columns]``."""
        scores: Tensor = self.layers(inputs)
        return scores

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Returns the loss, and other means over the batch as ``metrics``; the engine calls it."""
        scores = self(batch["inputs"])
        is_right = scores.argmax(1) == batch["labels"]
        return LossOutput(cross_entropy(scores, batch["labels"]), metrics={"accuracy": is_right.float().mean()})
