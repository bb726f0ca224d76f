"""Puts the state of a training into a checkpoint, and restores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellfed import generators
from wellfed.errors import ConfigError, type_and_line
from wellfed.train.checkpoint_values import load

if TYPE_CHECKING:
    from wellfed.train.loop.training import Training

_LOG = logging.getLogger(__name__)


def state_of(training: Training) -> dict[str, Any]:
    """Returns the content of a checkpoint between two steps. All ranks call it."""
    model, place = training.model, training.model.place
    own, position = generators.state(model.device), training.loader.state_dict()
    weights = {"state_dict": model.whole.state_dict()}
    if training.ema is not None:
        weights["current_model_state"] = weights["state_dict"]
        weights["state_dict"] = training.ema.averaged.module.state_dict()
    content: dict[str, Any] = {
        **weights,
        "optimizer_states": [training.optimizer.state_dict()],
        "lr_schedulers": [training.rates.state_dict()],
        "global_step": training.number,
        "epoch": training.epoch,
        "position": position,
        "position_of_ranks": place.gather(position),
        "elapsed_s": time.monotonic() - training.began_s,
        "figures": dict(training.figures.latest),
        "callbacks": {name: callback.state_dict() for name, callback in training.callbacks.items()},
        "rng": own,
        "rng_of_ranks": place.gather(own),
        "totals": model.totals.state_dict(place.mean if place.size > 1 else None),
    }
    if training.scaler is not None:
        content["scaler"] = training.scaler.state_dict()
    return content


def load_state(training: Training, path: Path) -> Mapping[str, Any] | None:
    """Restores a training from a checkpoint but for its generators, whose states are returned; None = unknown.

    They are restored before the next step, since others draw until then.

    Raises:
        ConfigError: the checkpoint does not hold such a state.
    """
    try:
        return _restored(training, load(path, trusted=training.is_trusted))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"its state can't be restored ({type_and_line(error)})."
        way_out = "Name another, e.g. last-1.ckpt. HYDRA_FULL_ERROR=1 shows where it failed."
        if isinstance(error, KeyError):
            way_out = (
                "If another version of wellfed wrote it: rerun=<its run>. HYDRA_FULL_ERROR=1 shows where it failed."
            )
        raise ConfigError.of(str(path), problem, way_out) from error


def _restored(training: Training, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    model, place, optimizer = training.model, training.model.place, training.optimizer
    model.whole.load_state_dict(state.get("current_model_state", state["state_dict"]))
    if training.ema is not None:
        training.ema.averaged.module.load_state_dict(state["state_dict"])
    model.totals.load_state_dict(state["totals"])
    before = state["optimizer_states"][0]
    if _num_weights(before) < _num_weights(optimizer.state_dict()):
        _LOG.warning("More weights are trained than before this checkpoint: the optimizer begins without a state.")
        for group, earlier in zip(optimizer.param_groups, before["param_groups"], strict=False):
            group["lr"] = earlier["lr"]  # a scheduler goes on from it
    else:
        optimizer.load_state_dict(before)
    if optimizer.defaults.get("foreach") is False:  # typed, while the checkpoint has another value
        for group in optimizer.param_groups:
            group["foreach"] = False
    if training.scaler is not None and "scaler" in state:
        training.scaler.load_state_dict(state["scaler"])
    training.rates.load_state_dict(state["lr_schedulers"][0])
    is_same = len(state["rng_of_ranks"]) == place.size
    rank = place.rank if is_same else 0
    training.loader.load_state_dict(state["position_of_ranks"][rank])
    training.number, training.epoch = int(state["global_step"]), int(state["epoch"])
    training.elapsed_before_s = float(state["elapsed_s"])
    training.figures.latest.update(state["figures"])  # a scheduler or callback may look at them first
    for name, callback in training.callbacks.items():
        if name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][name])
    drawn: Mapping[str, Any] = state["rng_of_ranks"][rank]
    return drawn if is_same or place.rank == 0 else None


def _num_weights(optimizer_state: Mapping[str, Any]) -> int:
    return sum(len(group["params"]) for group in optimizer_state["param_groups"])
