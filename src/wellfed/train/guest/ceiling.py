"""Measures the ceiling: the rate of the same steps on batches that are already on the device.

A separate Trainer makes real steps of the run's module. Weights, buffers and generators are restored afterwards. Hooks,
callbacks and schedulers of the module are not called, since there is no epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import lightning.pytorch as pl

from wellfed import generators
from wellfed.batches import Delivery
from wellfed.train.guest.data import combined, replaced
from wellfed.train.guest.marks import samples_of
from wellfed.train.loop.ceiling import CEILING_BATCHES

_HOOKS = [name for name in dir(pl.LightningModule) if name.startswith("on_") and not name.endswith("_transfer")]
"""Hooks that are no part of the step."""


def first_batches(loaders: Any, num_ranks: int) -> list[Delivery]:
    """Returns the first batches of the user's loaders, of which each rank reads its own. Nothing is drawn."""
    loader = combined(loaders)
    with generators.kept(loaders):
        found = [batch for batch, *_ in islice(iter(loader), CEILING_BATCHES) if batch is not None]
        loader.reset()
    return [Delivery(one, 0, 0, samples_of(one) * num_ranks, num_samples=samples_of(one)) for one in found]


@contextmanager
def steps_alone(module: pl.LightningModule, data_module: Any = None, *, is_set_up: bool) -> Iterator[None]:
    """Disables all hooks of a module and its data that are not a part of a step.

    Args:
        data_module: module of data that are set up.
        is_set_up: False: the module's ``setup`` is called.
    """
    done = dict.fromkeys(("prepare_data", "setup", "teardown"), _nothing)
    own: dict[str, Any] = {**dict.fromkeys(_HOOKS, _nothing), "configure_callbacks": list}
    if is_set_up:
        own |= {**done, "configure_model": _nothing}
    with replaced(module, own), nullcontext() if data_module is None else replaced(data_module, done):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing, in place of a hook."""


class NoSchedulers(pl.Callback):
    """Steps without the schedulers of ``configure_optimizers``, which count and may monitor a validation."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if module.automatic_optimization:  # with manual optimization the step calls them
            trainer.lr_scheduler_configs.clear()
