"""The evaluation of a workload that brings none: the mean loss over a split."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from wellfed.contract import Batch, FeatureSource
from wellfed.loading import batches


class MeanLoss:
    """Each batch counts by its weight, so the size of batches changes nothing."""

    best_metric = "loss"
    best_mode: Literal["max", "min"] = "min"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sum: Tensor | None = None
        self._weight = 0

    def update(self, model: nn.Module, batch: Batch, /, *features: FeatureSource) -> None:
        """Add a batch's loss, weighted by its size."""
        self.add(model, batch, batches.batch_size(batch))

    def add(self, model: nn.Module, batch: Batch, weight: int) -> None:
        """Add a batch's loss, which is a mean over this weight."""
        loss = model.loss(batch).loss.detach().double() * weight  # type: ignore[operator]
        self._sum = loss if self._sum is None else self._sum + loss
        self._weight += weight

    def compute(self) -> dict[str, float]:
        """``loss``."""
        return {} if self._sum is None else {"loss": float(self._sum) / max(1, self._weight)}

    def artifacts(self, folder: Any) -> dict[str, Any]:
        """None."""
        return {}
