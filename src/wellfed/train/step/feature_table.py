"""Holds a workload's feature rows while it trains, and moves them off the device where the room is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, FeatureModeName, Features, FeatureSource
from wellfed.record import OnEvent
from wellfed.train.memory import features as feature_room
from wellfed.train.memory import oom
from wellfed.train.memory.ladder import MicroBatches


@dataclass(frozen=True)
class FeatureStage:
    """How features are held from an epoch on, and what goes with it."""

    from_epoch: int
    mode: FeatureModeName
    micro: MicroBatches
    checkpoints: bool
    """Activations are recomputed."""
    trains_encoder: bool
    """Where there is one that the stages before have kept frozen."""


class FeatureTable:
    """Filled once, when the model is on its device and has its weights.

    State: not held, then one of the modes; from there only on to a slower one.
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
        """``rows`` are all of them, where they have been computed on the CPU already. Where there is no room for the
        table and the mode ``may_change``, a slower one is taken, but not ``dynamic`` for an encoder that
        ``awaits_training``: the model takes it for one that is trained, dropout included."""
        self._features, self.mode, self._rows, self._may_change = features, mode, rows, may_change
        self._awaits_training = awaits_training
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
        while self._may_change and (slower := feature_room.slower(self.mode)) is not None and self._allows(slower):
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
        if FEATURE_MODES.index(mode) <= FEATURE_MODES.index(self.mode) or not self._allows(mode):
            return False
        self.source, self.mode = feature_room.moved(self.source, self._features, mode, device), mode
        return True

    def begin(self, stage: FeatureStage, device: torch.device) -> None:
        """Go on as a stage has it, or with the slower mode that is in use by now; nothing is computed anew."""
        self._features = replace(self._features, trainable=stage.trains_encoder)
        self._awaits_training &= not stage.trains_encoder
        mode = max(stage.mode, self.mode, key=FEATURE_MODES.index)
        if not isinstance(self.source, _NotHeld) and (mode != self.mode or mode == "dynamic"):
            self.source = feature_room.moved(self.source, self._features, mode, device)
        self.mode = mode
        if mode == "dynamic":
            self._rows = None

    def _allows(self, mode: FeatureModeName) -> bool:
        return mode != "dynamic" or not self._awaits_training


class _NotHeld:
    """Stands for features until the model is on its device."""

    def rows(self, indices: Tensor) -> Tensor:
        raise RuntimeError("features are asked for before training or evaluation has started")
