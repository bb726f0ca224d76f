"""Holds a workload's feature rows during training; moves them off the device when memory runs out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, FeatureModeName, Features, FeatureSource
from wellfed.record.entries import OnEvent
from wellfed.train.memory import features as sources
from wellfed.train.memory import oom


class FeatureTable:
    """Feature rows, made once the model is on its device and has its weights.

    States: not held, then a mode, then only slower modes.
    """

    def __init__(
        self,
        features: Features,
        mode: FeatureModeName,
        *,
        may_change: bool,
    ) -> None:
        """
        Args:
            may_change: take a slower mode if the table does not fit.
        """
        self._features, self.mode, self._may_change = features, mode, may_change
        self.source: FeatureSource = _NotHeld()

    def hold(self, model: nn.Module, device: torch.device, on_event: OnEvent) -> None:
        """Fills the table, unless that is done."""
        if not isinstance(self.source, _NotHeld):
            return

        def fill() -> None:
            self.source = sources.hold(self._features, self.mode, device)

        attempts = oom.Attempts()
        with sources.in_eval_mode(model):
            while self._may_change and (slower := sources.slower(self.mode)) is not None:
                _, failure = attempts(fill)
                if failure is None:
                    break
                on_event("oom", message=failure.message)
                oom.release()
                self.mode = slower
                on_event("ladder", change=f"memory.features={slower}")
            else:
                fill()

    def move_to(self, mode: FeatureModeName, device: torch.device) -> bool:
        """Changes to a slower mode; returns False if that mode or a slower one is in use."""
        if FEATURE_MODES.index(mode) <= FEATURE_MODES.index(self.mode):
            return False
        self.source, self.mode = sources.moved(self.source, self._features, mode, device), mode
        return True


class _NotHeld:
    """Placeholder for features until the model is on its device."""

    def rows(self, indices: Tensor) -> Tensor:
        raise RuntimeError("features are asked for before training or evaluation has started")
