"""Puts the state of a training into a checkpoint, and restores it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from wellfed import generators
from wellfed.errors import ConfigError, is_the_users, type_and_line
from wellfed.train.checkpoint_values import load

if TYPE_CHECKING:
    from wellfed.train.loop.training import Training


def state_of(training: Training) -> dict[str, Any]:
    """Returns the content of a checkpoint between two steps. All ranks call it."""
    model, place = training.model, training.model.place
    own, position = generators.state(model.device), training.loader.state_dict()
    weights = {"state_dict": model.whole.state_dict()}
    if training.average is not None:
        weights = {"state_dict": training.average.state_dict(), "current_model_state": weights["state_dict"]}
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
        "trained": _trained(model.model),
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
    model, place, optimizer = training.model, training.model.place, training.optimizer
    with _restoring(path):
        state = load(path, trusted=training.checkpoints is not None and training.checkpoints.is_trusted)
        model.whole.load_state_dict(state.get("current_model_state", state["state_dict"]))
        if training.average is not None:
            training.average.load_state_dict(state["state_dict"])
        model.totals.load_state_dict(state["totals"])
        optimizer.load_state_dict(_of_trained(model.model, state["optimizer_states"][0], state["trained"]))
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


def _trained(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def _of_trained(model: nn.Module, state: dict[str, Any], before: list[str]) -> dict[str, Any]:
    """Returns the state of an optimizer whose checkpoint had trained these weights. Others begin without a state."""
    now = _trained(model)
    if not set(before) < set(now) or callable(getattr(model, "param_groups", None)):
        return state
    (group,) = state["param_groups"]
    return {
        "state": {now.index(before[number]): each for number, each in state["state"].items()},
        "param_groups": [{**group, "params": list(range(len(now)))}],
    }


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
