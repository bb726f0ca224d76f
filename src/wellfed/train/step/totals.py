"""Sums the figures of micro-batches and steps on the device, until a row of means is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Totals:
    """Weighted sums of metrics on the device, read in one transfer.

    The current step's figures are pending until the step has succeeded, so a step that is done again counts once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._pending: list[tuple[str, Tensor]] = []
        self._held: list[tuple[str, Tensor]] | None = None
        self.count = 0

    def add(self, name: str, value: Tensor, share: float, *, is_overwritten: bool = False) -> None:
        """Adds a micro-batch's mean with its share of the step, 0..1; copied if the next one overwrites its memory."""
        value = value.detach().float()
        if share != 1:
            value = value * share
        elif is_overwritten:
            value = value.clone()
        self._pending.append((name, value))

    def pending(self, name: str) -> Tensor:
        """Returns the current step's sum so far."""
        values = [value for known, value in self._pending if known == name]
        return values[0] if len(values) == 1 else torch.stack(values).sum()

    def hold(self) -> None:
        """Makes the pending figures those of the step, also if the optimizer asks for gradients again."""
        if self._held is None:
            self._held, self._pending = self._pending, []

    def drop(self, *, held: bool = False) -> None:
        """Drops pending figures, since the passes will be done again; ``held``: the step is left out."""
        self._pending.clear()
        if held:
            self._held = []

    def commit(self) -> None:
        """Adds the pending figures of a step that succeeded; none if it was left out."""
        pending = self._pending if self._held is None else self._held
        for name, value in pending:
            known = self._sums.get(name)
            if known is not None and known.device != value.device:  # loaded from a checkpoint
                known = known.to(value.device)
            self._sums[name] = value if known is None else known + value
        self.count += bool(pending)
        self._pending.clear()
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the last `take`, for a checkpoint."""
        return {"sums": dict(self._sums), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the sums."""
        self._sums, self.count = dict(state["sums"]), int(state["count"])

    def forget(self) -> None:
        """Sets the sums to nothing."""
        self._sums, self.count = {}, 0

    def take(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Returns means over the steps since the last call, over all ranks by ``reduce``; waits for the device once."""
        if not self._sums or not self.count:
            return {}
        stacked = torch.stack([value.reshape(()) for value in self._sums.values()]) / self.count
        means = dict(zip(self._sums, (reduce(stacked) if reduce else stacked).tolist(), strict=True))
        self.forget()
        return means
