"""Writes metrics of training and evaluation to the journal, each once a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from wellfed.train.loop.checkpoints import non_finite


class Figures:
    """Metrics by name, as ``val/loss``: the latest, and rows for the journal."""

    def __init__(self, take: Callable[..., None], *, every: int, stops_on_nan: bool) -> None:
        """
        Args:
            take: called as `Journal.metrics`.
            every: steps between two rows of training.
            stops_on_nan: raise a `NonFiniteLoss` for a mean loss of training that is not finite.
        """
        self._take, self.every, self.stops_on_nan = take, every, stops_on_nan
        self.step, self.epoch = 0, 0
        """Progress of training, for all rows."""
        self.handed_over_step = 0
        """Last step whose metrics are written."""
        self.validated_step: int | None = None
        self.latest: dict[str, float] = {}
        self._written_at: dict[str, int] = {}
        """Metric -> step of its latest value; it is written once a step."""

    def begin(self, step: int, epoch: int) -> None:
        """Begins a training that goes on after a step."""
        self.step, self.epoch, self.handed_over_step = step, epoch, step

    def trained(self, values: Mapping[str, float]) -> None:
        """Writes the means since the last row of training.

        Raises:
            NonFiniteLoss: the mean loss is not finite.
        """
        if self.stops_on_nan and not math.isfinite(values.get("loss", 0.0)):
            raise non_finite(self.handed_over_step + 1, self.step)
        self.handed_over_step = self.step
        self.write("train", values, has_rate=True)

    def validated(self, values: Mapping[str, float]) -> None:
        """Writes the metrics of a validation after the present step."""
        self.validated_step = self.step
        self.write("val", values)

    def write(self, split: str, values: Mapping[str, float], *, has_rate: bool = False) -> None:
        """Writes metrics of a split; those of this step that are written already are left out."""
        values = {name: value for name, value in values.items() if self._written_at.get(f"{split}/{name}") != self.step}
        named = {f"{split}/{name}": value for name, value in values.items()}
        if not named:
            return
        self._written_at.update(dict.fromkeys(named, self.step))
        self.latest.update(named)
        self._take(split, values, step=self.step, epoch=self.epoch, has_rate=has_rate)
