"""Sums figures of micro-batches and steps on the device until their means are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Totals:
    """Weighted values of metrics on the device, summed and read in one transfer.

    Figures are pending until their step has succeeded, so a repeated step counts once. Sums are float64, so that they
    do not depend on when they are taken.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []
        self.forget()

    def forget(self) -> None:
        """Deletes all figures."""
        self._values: dict[str, list[Tensor]] = {}
        self.count = 0

    def add(self, name: str, value: Tensor, share: float, *, is_overwritten: bool = False) -> None:
        """Adds a micro-batch's mean with its share of the step, 0..1; copied if its memory may be overwritten."""
        # Others may write to a buffer, or to an element of one.
        is_shared = is_overwritten or value.grad_fn is None or value._is_view()
        value = value.detach().float().reshape(())
        if share != 1:
            value = value * share
        elif is_shared:
            value = value.clone()
        self._pending.append((name, value))

    def pending(self, name: str) -> Tensor:
        """Returns the current step's sum so far."""
        values = [value for known, value in self._pending if known == name]
        return values[0] if len(values) == 1 else torch.stack(values).sum()

    def drop(self) -> None:
        """Drops pending figures, since the passes are repeated or the step is left out."""
        self._pending.clear()

    def commit(self) -> None:
        """Adds the figures of a step that succeeded; there are none if it was left out."""
        for name, value in self._pending:
            self._values.setdefault(name, []).append(value)
        self.count += bool(self._pending)
        self._pending.clear()

    def _sums(self, reduce: Callable[[Tensor], Tensor] | None, count: int = 1) -> dict[str, Tensor]:
        """Returns the sums over a number of steps, reduced over ranks, on the CPU."""
        if not self._values:
            return {}
        devices = [values[-1].device for values in self._values.values()]
        # Sums of a checkpoint are on the CPU.
        device = next((each for each in devices if each.type != "cpu"), devices[0])
        sums = [torch.stack([each.to(device) for each in values]).double().sum() for values in self._values.values()]
        stacked = torch.stack(sums) / count
        return dict(zip(self._values, (reduce(stacked) if reduce else stacked).cpu(), strict=True))

    def state_dict(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Returns the sums since the last `take`, reduced over ranks."""
        return {"sums": self._sums(reduce), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the sums."""
        self._pending.clear()
        self._values = {name: [value] for name, value in state["sums"].items()}
        self.count = int(state["count"])

    def take(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Returns means over the steps since the last call, reduced over ranks. Waits for the device once."""
        means = self._sums(reduce, max(self.count, 1))
        self.forget()
        return {name: float(value) for name, value in means.items()}
