"""Computes the metrics of a split: means of the loss and its metrics, torchmetrics, the workload's own evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from wellfed import batches
from wellfed.contract import Batch, Evaluation, FeatureSource, LossOutput
from wellfed.errors import ConfigError
from wellfed.train.step.loss import Loss

_MOST_ENTRIES = 100
"""Maximum number of values of a metric that has one value per class."""


def can_be_shared(evaluation: Evaluation | Any | None) -> bool:
    """Returns whether the states of several ranks can be merged; those of torchmetrics can't."""
    return evaluation is None or all(callable(getattr(evaluation, name, None)) for name in ("state", "merge"))


class SplitMetrics:
    """All metrics of a split. If names are equal, the workload's own evaluation wins.

    The loss and `LossOutput.metrics` count as means by weight, so that batch sizes do not matter.
    """

    def __init__(self, model: nn.Module, evaluation: Evaluation | Any | None = None, metrics: Any = None) -> None:
        """
        Args:
            evaluation: the workload's own evaluation; may be metrics of torchmetrics.
            metrics: more metrics of torchmetrics, updated with `LossOutput.predictions` and ``targets``.
        """
        self._model, self._loss = model, Loss(model, needs_gradient=False)
        is_own = not isinstance(evaluation, (Metric, MetricCollection))
        self._own: Any = evaluation if is_own else None
        given: list[Any] = [each for each in (None if is_own else evaluation, metrics) if each is not None]
        self._metrics = [each if isinstance(each, MetricCollection) else MetricCollection(each) for each in given]
        inner: list[Any] = [module for each in self._metrics for module in each.modules()]
        for module in inner:
            module.sync_on_compute = False  # each rank sees the whole split
        self._sums: dict[str, tuple[Tensor, int]] = {}
        """Weighted sum of each mean, and its weight."""
        self.takes_loss: bool = getattr(self._own, "with_loss", True) or bool(self._metrics)
        self.best_metric: str = "loss" if self._own is None else self._own.best_metric
        self.best_mode: Literal["max", "min"] = "min" if self._own is None else self._own.best_mode

    def reset(self) -> None:
        """Resets all computations."""
        self._sums = {}
        for part in (*self._metrics, *([] if self._own is None else [self._own])):
            part.reset()

    def update(self, batch: Batch, weight: int, features: FeatureSource | None) -> None:
        """Adds a batch whose loss is a mean over ``weight``.

        Raises:
            ConfigError: the model's loss returns no predictions for torchmetrics.
        """
        if self.takes_loss:
            output = self._loss(batch)
            if weight:  # means over nothing are not finite
                for name, value in {**output.metrics, "loss": output.loss}.items():
                    self._add(name, value.detach().double().reshape(()) * weight, weight)
            if self._metrics:
                self._update_metrics(output)
        if self._own is not None:
            self._own.update(self._model, batch, *(() if features is None else (features,)))

    def _add(self, name: str, value: Tensor, weight: int) -> None:
        before, weight_before = self._sums.get(name, (0.0, 0))
        self._sums[name] = before + value, weight_before + weight

    def _update_metrics(self, output: LossOutput) -> None:
        predictions, targets = output.predictions, output.targets
        if predictions is None:
            problem = f"{type(self._model).__name__}.loss gives no predictions for them."
            way_out = "Return LossOutput(loss, predictions=..., targets=...): what the metrics' update takes."
            raise ConfigError.of("workload.metrics", problem, way_out)
        named: dict[str, Any] = dict(predictions) if isinstance(predictions, Mapping) else {}
        given = [] if named else [predictions] if targets is None else [predictions, targets]
        for metrics in self._metrics:
            metrics.to(next(batches.tensors([given, named]), output.loss).device)
            metrics.update(*given, **named)

    def compute(self) -> dict[str, float]:
        """Returns the metrics of all batches; waits for the device.

        Raises:
            ConfigError: a metric of torchmetrics is neither a number nor a few.
        """
        sums = torch.stack([value for value, _ in self._sums.values()]).tolist() if self._sums else []
        found = {name: value / self._sums[name][1] for name, value in zip(self._sums, sums, strict=True)}
        for metrics in self._metrics:
            found |= _figures(metrics)
        own = {} if self._own is None else self._own.compute()
        return found | {name: float(value) for name, value in own.items()}

    def state(self) -> list[Any]:
        """Returns the state of the means and of the workload's evaluation; not of torchmetrics."""
        return [self._sums, None if self._own is None else self._own.state()]

    def merge(self, states: Sequence[list[Any]]) -> None:
        """Replaces the state by the merged states of all ranks."""
        self._sums = {}
        for sums, _ in states:
            for name, (value, weight) in sums.items():
                self._add(name, value, weight)
        if self._own is not None:
            self._own.merge([own for _, own in states])

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Returns the files that the workload's evaluation writes."""
        return {} if self._own is None else dict(self._own.artifacts(folder))


def _figures(metrics: MetricCollection) -> dict[str, float]:
    """Returns the values of metrics by name; ``name_0``, ``name_1`` and so on for a metric with several."""
    found: dict[str, float] = {}
    for name, value in metrics.compute().items():
        figures = torch.as_tensor(value).detach().cpu()
        if figures.numel() == 1:
            found[name] = float(figures)
        elif figures.dim() == 1 and len(figures) <= _MOST_ENTRIES:
            found |= {f"{name}_{number}": float(one) for number, one in enumerate(figures)}
        else:
            problem = f"{name} is no number but of shape {list(figures.shape)}."
            raise ConfigError.of("workload.metrics", problem, "Leave it out, or use it in an evaluation of your own.")
    return found
