"""Sums the figures of micro-batches and steps on the device, until a row of means is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Totals:
    """Weighted sums of metrics on the device; handed over in one transfer.

    The current step's are pending until it is known to have succeeded, so that a step done again after an out-of-memory
    error counts once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._pending: list[tuple[str, Tensor]] = []
        self._held: list[tuple[str, Tensor]] | None = None
        self.count = 0

    def add(self, name: str, value: Tensor, share: float, *, is_overwritten: bool = False) -> None:
        """A micro-batch's mean with its share of the step, 0..1; copied if its memory is overwritten by the next."""
        value = value.detach().float()
        if share != 1:
            value = value * share
        elif is_overwritten:
            value = value.clone()
        self._pending.append((name, value))

    def pending(self, name: str) -> Tensor:
        """Of the current step so far."""
        values = [value for known, value in self._pending if known == name]
        return values[0] if len(values) == 1 else torch.stack(values).sum()

    def hold(self) -> None:
        """The pending figures are those of the step, whatever an optimizer that asks again is given."""
        if self._held is None:
            self._held = list(self._pending)

    def drop(self, *, held: bool = False) -> None:
        """The passes will be done again; ``held``: the step is left out."""
        self._pending.clear()
        if held:
            self._held = []

    def commit(self) -> None:
        """The step succeeded; nothing to do where it was left out."""
        pending = self._pending if self._held is None else self._held
        for name, value in pending:
            self._sums[name] = self._sums[name].to(value.device) + value if name in self._sums else value
        self.count += bool(pending)
        self._pending.clear()
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last `take`, for a checkpoint."""
        return {"sums": dict(self._sums), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these sums."""
        self._sums, self.count = dict(state["sums"]), int(state["count"])

    def forget(self) -> None:
        """Begin anew."""
        self._sums, self.count = {}, 0

    def take(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Means over the steps since the last call, by ``reduce`` over all ranks; waits for the device once."""
        if not self._sums or not self.count:
            return {}
        stacked = torch.stack([value.reshape(()) for value in self._sums.values()]) / self.count
        means = dict(zip(self._sums, (reduce(stacked) if reduce else stacked).tolist(), strict=True))
        self.forget()
        return means
