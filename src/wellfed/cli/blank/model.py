"""Tells the class of a row of numbers by two layers and a cross-entropy."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellfed import LossOutput


class Network(nn.Module):
    """Scores for each class.

    Args:
        num_inputs: the data says it, as it does ``num_classes`` (`Datasets.model_args`).
        hidden: width of the layer between.
    """

    def __init__(self, num_inputs: int, num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores ``[batch, classes]`` of inputs ``[batch, columns]``."""
        scores: Tensor = self.layers(inputs)
        return scores

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """What the engine calls; what else is worth watching goes into ``metrics``, as means over the batch."""
        scores = self(batch["inputs"])
        is_right = scores.argmax(1) == batch["labels"]
        return LossOutput(cross_entropy(scores, batch["labels"]), metrics={"accuracy": is_right.float().mean()})
