"""Sums figures of micro-batches and steps on the device until their means are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_MOST_HELD = 64
"""Values of a metric after which they are summed: one sum costs as much as adding a single value."""


class Totals:
    """Weighted sums of metrics on the device, read in one transfer.

    Figures are pending until their step has succeeded, so a repeated step counts once. Sums are float64, so that they
    do not depend on when they are taken.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []
        self._held: list[tuple[str, Tensor]] | None = None
        self.forget()

    def forget(self) -> None:
        """Deletes the sums."""
        self._sums: dict[str, Tensor] = {}
        self._values: dict[str, list[Tensor]] = {}  # not in the sums yet
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

    def hold(self) -> None:
        """Fixes the step's figures, even if the optimizer requests gradients again."""
        if self._held is None:
            self._held, self._pending = self._pending, []

    def drop(self, *, held: bool = False) -> None:
        """Drops pending figures, since the passes are repeated; ``held``: the step is skipped."""
        self._pending.clear()
        if held:
            self._held = []

    def commit(self) -> None:
        """Adds the figures of a step that succeeded; none if it was skipped."""
        pending = self._pending if self._held is None else self._held
        for name, value in pending:
            values = self._values.setdefault(name, [])
            values.append(value)
            if len(values) >= _MOST_HELD:
                self._sum_up()
        self.count += bool(pending)
        self._pending.clear()
        self._held = None

    def _sum_up(self) -> None:
        values, self._values = self._values, {}
        for name, held in values.items():
            device = held[-1].device  # sums of a checkpoint lie on the CPU
            total = torch.stack([value.to(device) for value in held]).double().sum(0)
            self._sums[name] = total + self._sums[name].to(device) if name in self._sums else total

    def _reduced(self, reduce: Callable[[Tensor], Tensor] | None, count: int = 1) -> dict[str, Tensor]:
        """Returns the sums over a number of steps, reduced over ranks."""
        self._sum_up()
        if not self._sums:
            return {}
        devices = [value.device for value in self._sums.values()]
        device = next((each for each in devices if each.type != "cpu"), devices[0])
        stacked = torch.stack([value.reshape(()).to(device) for value in self._sums.values()]) / count
        return dict(zip(self._sums, (reduce(stacked) if reduce else stacked).cpu(), strict=True))

    def state_dict(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Returns the sums since the last `take`, reduced over ranks."""
        return {"sums": self._reduced(reduce), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the sums."""
        self.forget()
        self._sums, self.count = dict(state["sums"]), int(state["count"])

    def take(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Returns means over the steps since the last call, reduced over ranks. Waits for the device once."""
        means = self._reduced(reduce, max(self.count, 1))
        self.forget()
        return {name: float(value) for name, value in means.items()}
