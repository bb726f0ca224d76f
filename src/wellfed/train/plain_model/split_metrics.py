"""Computes the metrics of a split: means of the loss and its metrics, torchmetrics, the workload's own evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from wellfed.contract import Batch, Evaluation, FeatureSource, LossOutput
from wellfed.errors import ConfigError
from wellfed.train.step.compiled import Loss

_LOG = logging.getLogger(__name__)
_MOST_ENTRIES = 100
"""Maximum number of values of a metric that has one value per class."""


class Means:
    """Means of the loss and of `LossOutput.metrics`, weighted so that batch sizes do not matter."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def reset(self) -> None:
        """Resets the means."""
        self._sums = {}

    def add(self, output: LossOutput, weight: int) -> None:
        """Adds a batch's values, which are means over this weight."""
        if weight:  # means over nothing are not finite
            for name, value in {**output.metrics, "loss": output.loss}.items():
                self._add(name, value.detach().double().reshape(()) * weight, weight)

    def _add(self, name: str, value: Tensor, weight: int) -> None:
        before, weight_before = self._sums.get(name, (None, 0))
        self._sums[name] = value if before is None else before + value, weight_before + weight

    def compute(self) -> dict[str, float]:
        """Returns the means, with one transfer to the host."""
        sums = torch.stack([value for value, _ in self._sums.values()]).tolist() if self._sums else []
        return {name: value / self._sums[name][1] for name, value in zip(self._sums, sums, strict=True)}

    def state(self) -> dict[str, tuple[Tensor, int]]:
        """Returns the sums of values and of weights."""
        return self._sums

    def merge(self, states: Sequence[dict[str, tuple[Tensor, int]]]) -> None:
        """Replaces the state by the sum of the states of all ranks."""
        self.reset()
        for state in states:
            for name, (value, weight) in state.items():
                self._add(name, value, weight)


class TorchMetrics:
    """Metrics of torchmetrics, updated with `LossOutput.predictions` and ``targets``."""

    def __init__(self, metrics: Metric | MetricCollection) -> None:
        self._metrics = metrics if isinstance(metrics, MetricCollection) else MetricCollection(metrics)
        self._all: list[Any] = [module for module in self._metrics.modules() if isinstance(module, Metric)]
        for metric in self._all:
            metric.sync_on_compute = False  # numbers of batches may differ by rank: see `merge`
        self._warned_of: set[str] = set()

    def reset(self) -> None:
        """Resets all metrics."""
        self._metrics.reset()

    def update(self, output: LossOutput, model: nn.Module) -> None:
        """Adds a batch.

        Raises:
            ConfigError: the model's loss returns no predictions.
        """
        predictions, targets = output.predictions, output.targets
        if predictions is None:
            problem = f"{type(model).__name__}.loss gives no predictions for them."
            way_out = "Return LossOutput(loss, predictions=..., targets=...): what the metrics' update takes."
            raise ConfigError.of("workload.metrics", problem, way_out)
        named: dict[str, Any] = dict(predictions) if isinstance(predictions, Mapping) else {}
        given = [] if named else [predictions] if targets is None else [predictions, targets]
        for value in [*given, *named.values()]:
            if isinstance(value, Tensor):
                self._metrics.to(value.device)
                break
        self._metrics.update(*given, **named)

    def compute(self) -> dict[str, float]:
        """Returns the values by name; ``name_0``, ``name_1`` and so on for a metric with several."""
        found: dict[str, float] = {}
        for name, value in self._metrics.compute().items():
            figures = torch.as_tensor(value).detach().cpu()
            if figures.numel() == 1:
                found[name] = float(figures)
            elif figures.dim() == 1 and len(figures) <= _MOST_ENTRIES:
                found |= {f"{name}_{number}": float(one) for number, one in enumerate(figures)}
            elif name not in self._warned_of:
                self._warned_of.add(name)
                _LOG.warning("The metric %s is no number but of shape %s: left out.", name, tuple(figures.shape))
        return found

    def state(self) -> list[dict[str, Any]]:
        """Returns the state of each metric."""
        return [dict(metric.metric_state) for metric in self._all]

    def merge(self, states: Sequence[list[dict[str, Any]]]) -> None:
        """Merges the states of all ranks as torchmetrics does between ranks with equally many batches."""
        for number, metric in enumerate(self._all):
            for name, reduce in metric._reductions.items():
                setattr(metric, name, _reduced([state[number][name] for state in states], reduce, metric.device))
            metric._computed, metric._update_count = None, max(1, metric._update_count)


def _reduced(values: list[Any], reduce: Any, device: torch.device) -> Any:
    if isinstance(values[0], Tensor) and not any(isinstance(value, list) for value in values):
        stacked = torch.stack([value.to(device) for value in values])
        return stacked if reduce is None else reduce(stacked)
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item.to(device) if isinstance(item, Tensor) else item for item in flat]


def can_be_shared(evaluation: Evaluation | Any | None) -> bool:
    """Returns whether the states of several ranks can be merged."""
    is_merged = evaluation is None or isinstance(evaluation, (Metric, MetricCollection))
    return is_merged or all(callable(getattr(evaluation, name, None)) for name in ("state", "merge"))


class SplitMetrics:
    """All metrics of a split. If names are equal, the workload's own evaluation wins."""

    def __init__(self, model: nn.Module, evaluation: Evaluation | Any | None = None, metrics: Any = None) -> None:
        """
        Args:
            evaluation: the workload's own evaluation; may be metrics of torchmetrics.
            metrics: more metrics of torchmetrics.
        """
        self._model, self._loss = model, Loss(model, needs_gradient=False)
        is_own = not isinstance(evaluation, (Metric, MetricCollection))
        self.own: Evaluation | None = evaluation if is_own else None
        given: list[Any] = [each for each in (None if is_own else evaluation, metrics) if each is not None]
        self.means, self.metrics = Means(), [TorchMetrics(each) for each in given]
        self.takes_loss: bool = getattr(self.own, "with_loss", True) or bool(self.metrics)
        self.best_metric: str = "loss" if self.own is None else self.own.best_metric
        self.best_mode: Literal["max", "min"] = "min" if self.own is None else self.own.best_mode

    @property
    def parts(self) -> list[Any]:
        """The computations, each with its own state."""
        return [self.means, *self.metrics, *([] if self.own is None else [self.own])]

    def reset(self) -> None:
        """Resets all computations."""
        for part in self.parts:
            part.reset()

    def update(self, batch: Batch, weight: int, features: FeatureSource | None) -> None:
        """Adds a batch whose loss is a mean over ``weight``."""
        if self.takes_loss:
            output = self._loss(batch)
            self.means.add(output, weight)
            for metrics in self.metrics:
                metrics.update(output, self._model)
        if self.own is not None:
            self.own.update(self._model, batch, *(() if features is None else (features,)))

    def compute(self) -> dict[str, float]:
        """Returns the metrics of all batches; waits for the device."""
        found = {name: value for part in self.parts for name, value in part.compute().items()}
        return {name: float(value) for name, value in found.items()}

    def state(self) -> list[Any]:
        """Returns the state of each computation."""
        return [part.state() for part in self.parts]

    def merge(self, states: Sequence[list[Any]]) -> None:
        """Replaces the states by the merged states of all ranks."""
        for part, own in zip(self.parts, zip(*states, strict=True), strict=True):
            part.merge(list(own))

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Returns the files that the workload's evaluation writes."""
        return {} if self.own is None else dict(self.own.artifacts(folder))
