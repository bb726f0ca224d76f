"""The evaluation of a workload that brings none: the mean loss over a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.contract import Batch, FeatureSource


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

    def state(self) -> tuple[Tensor | None, int]:
        """Sum of losses and of weights."""
        return self._sum, self._weight

    def merge(self, states: Sequence[tuple[Tensor | None, int]]) -> None:
        """Those of all ranks."""
        sums = [own for own, _ in states if own is not None]
        self._sum = torch.stack(sums).sum() if sums else None
        self._weight = sum(weight for _, weight in states)

    def artifacts(self, folder: Any) -> dict[str, Any]:
        """None."""
        return {}
