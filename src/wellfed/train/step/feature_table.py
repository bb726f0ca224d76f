"""Holds a workload's feature rows during training; moves them off the device when memory runs out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, FeatureModeName, Features, FeatureSource
from wellfed.record import OnEvent
from wellfed.train.memory import features as sources
from wellfed.train.memory import oom
from wellfed.train.memory.step_down import MicroBatches


@dataclass(frozen=True)
class FeatureStage:
    """One of ``memory.stages``: the mode of the features from an epoch on, and its micro-batch."""

    from_epoch: int
    mode: FeatureModeName
    micro: MicroBatches
    checkpoints: bool
    """Whether activations are recomputed."""
    trains_encoder: bool
    """Whether an encoder that earlier stages kept frozen is trained."""


class FeatureTable:
    """Feature rows, made once the model is on its device and has its weights.

    States: not held, then a mode, then only slower modes.
    """

    def __init__(
        self,
        features: Features,
        mode: FeatureModeName,
        rows: Tensor | None,
        *,
        may_change: bool,
        awaits_training: bool = False,
    ) -> None:
        """
        Args:
            rows: all rows, if they have been computed on the CPU already.
            may_change: take a slower mode if the table does not fit.
            awaits_training: a later stage trains the encoder. ``dynamic`` is not taken before, since the model would
                treat the encoder as trained, dropout included.
        """
        self._features, self.mode, self._rows, self._may_change = features, mode, rows, may_change
        self._awaits_training = awaits_training
        self.source: FeatureSource = _NotHeld()

    def hold(self, model: nn.Module, device: torch.device, on_event: OnEvent) -> None:
        """Fills the table, unless that is done."""
        if not isinstance(self.source, _NotHeld):
            return

        def fill() -> None:
            known = self._rows if device.type == "cpu" else None
            self.source = sources.hold(self._features, self.mode, device, known)

        attempts = oom.Attempts()
        with sources.in_eval_mode(model):
            while self._may_change and (slower := sources.slower(self.mode)) is not None and self._allows(slower):
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
        if FEATURE_MODES.index(mode) <= FEATURE_MODES.index(self.mode) or not self._allows(mode):
            return False
        self.source, self.mode = sources.moved(self.source, self._features, mode, device), mode
        return True

    def begin(self, stage: FeatureStage, device: torch.device) -> None:
        """Begins a stage, in its mode or a slower one that is in use; computes no rows."""
        self._features = replace(self._features, trainable=stage.trains_encoder)
        self._awaits_training &= not stage.trains_encoder
        mode = max(stage.mode, self.mode, key=FEATURE_MODES.index)
        if not isinstance(self.source, _NotHeld) and (mode != self.mode or mode == "dynamic"):
            self.source = sources.moved(self.source, self._features, mode, device)
        self.mode = mode
        if mode == "dynamic":
            self._rows = None

    def _allows(self, mode: FeatureModeName) -> bool:
        return mode != "dynamic" or not self._awaits_training


class _NotHeld:
    """Placeholder for features until the model is on its device."""

    def rows(self, indices: Tensor) -> Tensor:
        raise RuntimeError("features are asked for before training or evaluation has started")
