"""Holds the objects of a run: data, model and callbacks, as `assemble` builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from wellfed.contract import Datasets, Features
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.plan.predict.peak import KnownFootprints

if TYPE_CHECKING:
    from wellfed.train.guest.data import GuestLoaders


@dataclass(frozen=True)
class RunObjects:
    """Objects built from the configuration: data, model, callbacks."""

    data: Datasets
    model: nn.Module
    features: Features | None
    brings_step: bool = False
    """The model is the user's LightningModule, which brings step, optimizer and metrics."""
    guest: GuestLoaders | None = None
    """Loaders of a guest, which Lightning reads; None: the run is no guest's."""
    why_guest: str = ""
    """Why the run trains under Lightning's own Trainer."""
    has_sparse_gradients: bool = False
    """A weight gets sparse gradients, as with ``nn.Embedding(sparse=True)``."""
    first_batches: FirstBatches | None = None
    """Sizes and times of the first batches, if already known."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    footprints: KnownFootprints | None = None
    """Footprints already known for this way of training."""
    given: Datasets | None = None
    """The data as the user's code returned them; None if a module of Lightning has them."""

    def for_features(self, mode: str | None) -> Self:
        """Returns the objects with data whose batches have what that mode of features needs."""
        if self.data.features is None:
            return self

        def switched(split: Any) -> Any:
            switch = getattr(split, "for_features", None)
            return switch(mode) if callable(switch) else split

        splits = {name: switched(getattr(self.data, name)) for name in ("train", "val", "test")}
        return replace(self, data=replace(self.data, **splits))
