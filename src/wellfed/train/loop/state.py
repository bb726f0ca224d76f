"""Puts the state of a training into a checkpoint, and restores it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wellfed import generators
from wellfed.errors import ConfigError, is_the_users, type_and_line
from wellfed.train.checkpoint_values import load
from wellfed.train.loop.callbacks import Ema

if TYPE_CHECKING:
    from wellfed.train.loop.training import Training

_LOG = logging.getLogger(__name__)


def state_of(training: Training) -> dict[str, Any]:
    """Returns the content of a checkpoint between two steps, but for that of callbacks. All ranks call it; that of
    rank 0 is whole."""
    model, place = training.model, training.model.place
    own, position = generators.state(model.device), training.loader.state_dict()
    content: dict[str, Any] = {
        "state_dict": model.weights(),
        "optimizer_states": [model.optimizer_state(training.optimizer)],
        "lr_schedulers": [training.rates.state_dict()],
        "global_step": training.number,
        "epoch": training.epoch,
        "position": position,
        "elapsed_s": training.elapsed_s,
        "figures": dict(training.figures.latest),
        "callbacks": {},
        "rng": own,
        "trained": model.trained(),
        "totals": model.totals.state_dict(place.mean if place.size > 1 else None),
    }
    if place.size > 1:
        content["rng_of_ranks"] = place.gather(own)
        content["position_of_ranks"] = place.gather(position)
    if training.scaler is not None:
        content["scaler"] = training.scaler.state_dict()
    return content


def load_state(training: Training, path: Path) -> Mapping[str, Any] | None:
    """Restores a training from a checkpoint but for its generators, whose states are returned; None = unknown.

    They are restored before the next step, since others draw until then.

    Raises:
        ConfigError: the checkpoint does not hold such a state.
    """
    with _restoring(path):
        state = load(path, trusted=training.checkpoints is not None and training.checkpoints.options.trusted)
        model, place, callbacks = training.model, training.model.place, training.callbacks
        if "current_model_state" in state and not any(isinstance(one, Ema) for one in callbacks.values()):
            _LOG.warning("The weights were averaged in the run that goes on; from here on they are not.")
        model.load(state.get("current_model_state", state["state_dict"]))
        model.totals.load_state_dict(state["totals"])
        model.load_optimizer_state(training.optimizer, state["optimizer_states"][0], state["trained"])
        if training.scaler is not None and "scaler" in state:
            training.scaler.load_state_dict(state["scaler"])
        training.rates.load_state_dict(state["lr_schedulers"][0], training.optimizer)
        positions = state.get("position_of_ranks", ())
        training.loader.load_state_dict(positions[place.rank] if len(positions) == place.size else state["position"])
        training.number, training.epoch = int(state["global_step"]), int(state["epoch"])
        training.elapsed_before_s = float(state["elapsed_s"])
        training.figures.latest.update(state["figures"])  # a scheduler or callback may look at them first
        for name, callback in callbacks.items():
            callback.load_from(state, name)
        of_ranks = state.get("rng_of_ranks", ())
        if len(of_ranks) == place.size:
            drawn: Mapping[str, Any] | None = of_ranks[place.rank]
        else:
            drawn = state["rng"] if place.rank == 0 or not place.is_replicated else None
        if drawn is not None:
            with generators.kept():  # a damaged state ends the run here, before training
                generators.restore(dict(drawn), torch.device("cpu"))
        return drawn


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    """Raises a ConfigError instead of an error of restoring a checkpoint. Errors of the user's code pass."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        frames = traceback.walk_tb(error.__traceback__)
        if any(is_the_users(frame.f_code.co_filename) for frame, _ in frames):
            raise
        problem = f"its state can't be restored ({type_and_line(error)})."
        way_out = "Name another, e.g. last-1.ckpt. HYDRA_FULL_ERROR=1 shows where it failed."
        raise ConfigError.of(str(path), problem, way_out) from error
