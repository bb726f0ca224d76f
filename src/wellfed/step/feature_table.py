"""Holds a workload's feature rows while it trains, and moves them off the device where the room is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, FeatureModeName, Features, FeatureSource
from wellfed.memory import features as feature_room
from wellfed.memory import oom
from wellfed.record import OnEvent


class FeatureTable:
    """Filled once, when the model is on its device and has its weights.

    State: not held, then one of the modes; from there only on to a slower one.
    """

    def __init__(self, features: Features, mode: FeatureModeName, rows: Tensor | None, *, may_change: bool) -> None:
        """``rows`` are all of them, where they have been computed on the CPU already. Where there is no room for the
        table and the mode ``may_change``, a slower one is taken."""
        self._features, self.mode, self._rows, self._may_change = features, mode, rows, may_change
        self.source: FeatureSource = _NotHeld()

    def hold(self, model: nn.Module, device: torch.device, on_event: OnEvent) -> None:
        """Fill the table, unless it is there."""
        if not isinstance(self.source, _NotHeld):
            return

        def fill() -> None:
            known = self._rows if device.type == "cpu" else None
            self.source = feature_room.hold(self._features, self.mode, device, known)

        was_training, attempts = model.training, oom.Attempts()
        model.eval()
        while self._may_change and (slower := feature_room.slower(self.mode)) is not None:
            _, failure = attempts(fill)
            if failure is None:
                break
            on_event("oom", message=failure.message)
            oom.release()
            self.mode = slower
            on_event("ladder", change=f"memory.features={slower}")
        else:
            fill()
        model.train(was_training)

    def move_to(self, mode: FeatureModeName, device: torch.device) -> bool:
        """Go on with a slower mode; False where it is in use, or one that is slower still."""
        if FEATURE_MODES.index(mode) <= FEATURE_MODES.index(self.mode):
            return False
        self.source, self.mode = feature_room.moved(self.source, self._features, mode, device), mode
        return True


class _NotHeld:
    """Stands for features until the model is on its device."""

    def rows(self, indices: Tensor) -> Tensor:
        raise RuntimeError("features are asked for before training or evaluation has started")
