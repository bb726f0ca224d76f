"""Checks what a user's ``loss`` returns, and adds shapes, layer and batch to its errors."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.batches import Delivery, shapes_of
from wellfed.contract import Batch, LossOutput
from wellfed.errors import ModelError, WellfedError, is_the_users
from wellfed.train.memory import oom

_RETURN = "Return the loss as a tensor of one number, a dict with 'loss', or LossOutput(loss, metrics={...})."
_OWN_FIGURES = {"loss": "the loss", "lr": "the learning rate"}
"""Names that the engine records itself -> what they mean."""


def output_of(given: Any, name: str, *, needs_gradient: bool) -> LossOutput:
    """Converts the return value of ``loss`` to a `LossOutput`.

    Args:
        name: name of the function, for messages.
        needs_gradient: whether a backward pass follows.

    Raises:
        ModelError: the value can't be used as a loss, or a metric beside it is not one number or has a name of the
            engine's own.
    """
    if isinstance(given, Mapping):
        if "loss" not in given:
            keys = ", ".join(map(str, given)) or "nothing"
            raise ModelError(f"{name} returned a dict without 'loss'; it has {keys}. {_RETURN}")
        # A tensor of shape [1] may be the scores of one sample.
        figures = {str(key): value for key, value in given.items() if key != "loss" and _is_scalar(value)}
        output = LossOutput(given["loss"], metrics=figures)
    else:
        output = given if isinstance(given, LossOutput) else LossOutput(given)
    loss: Any = output.loss
    if not isinstance(loss, Tensor):
        way_out = "Is its return statement missing?" if loss is None else ""
        if isinstance(loss, (int, float)):
            way_out = "Leave out .item() and float(): a number has no gradient."
        raise ModelError(f"{name} returned {_kind(loss)} as the loss. {way_out} {_RETURN}".replace("  ", " "))
    if loss.dim():
        if loss.numel() != 1:
            raise ModelError(
                f"{name}: the loss has shape {list(loss.shape)}, and must be one number. Return loss.mean()."
            )
        output.loss = loss = loss.reshape(())
    if needs_gradient and torch.is_grad_enabled() and not loss.requires_grad:
        raise ModelError(
            f"{name}: the loss ({loss.dtype}) has no gradient. It was computed under torch.no_grad(), from .item(), "
            ".detach() or .data, from integers, or by no weight that is trained (requires_grad)."
        )
    metrics: Any = {} if output.metrics is None else output.metrics
    if not isinstance(metrics, Mapping):
        raise ModelError(f"{name}: the metrics are {_kind(metrics)}. Give a dict: metrics={{'accuracy': accuracy}}.")
    output.metrics = {key: _metric(value, key, loss, name) for key, value in metrics.items()}
    return output


def _metric(value: Any, key: str, loss: Tensor, name: str) -> Tensor:
    """Returns a metric as a tensor on the device of the loss."""
    if key in _OWN_FIGURES:
        problem = f"a metric has the name {key}, under which {_OWN_FIGURES[key]} is recorded"
        raise ModelError(f"{name}: {problem}. Leave it out, or rename it, such as own_{key}.")
    if isinstance(value, Tensor) and value.numel() == 1:
        return value if value.device == loss.device else value.to(loss.device)
    if isinstance(value, (int, float)):
        return torch.full((), float(value), device=loss.device)  # a fill; a copy would wait for the device
    kind = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is {_kind(value)}"
    raise ModelError(f"{name}: the metric {key} {kind}, and must be one number, such as its mean.")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return shapes_of(value) if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"


def add_context(error: Exception, name: str, batch: Batch, model: nn.Module) -> None:
    """Adds a note to an error of a user's function: the shapes of the batch, and the layer that failed.

    Args:
        name: name of the function, for the note.
        batch: None = unknown.
        model: its modules have the names of layers.
    """
    if isinstance(error, WellfedError) or oom.classify(error) is not None:
        return
    if batch is not None:
        error.add_note(f"{name} was given {shapes_of(batch)}.")
    paths = {id(module): path for path, module in model.named_modules() if path}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [layer for frame in frames if id(layer := frame.f_locals.get("self")) in paths]
    if layers:
        error.add_note(f"It failed in the layer {paths[id(layers[-1])]}, a {type(layers[-1]).__name__}.")
    if "Expected more than 1 value per channel when training" in str(error):
        error.add_note(
            "BatchNorm has no statistics of one sample. workload.drop_last=true leaves out a last batch of one."
        )


def add_context_of_module(error: Exception, module: nn.Module) -> None:
    """Adds a note like `add_context` to an error in a LightningModule's step."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = next((frame for frame in frames if is_the_users(frame.f_code.co_filename)), None)
    if own is not None:
        add_context(error, f"{type(module).__name__}.{own.f_code.co_name}", own.f_locals.get("batch"), module)


def add_place(error: Exception, delivery: Delivery, split: str) -> None:
    """Adds a note that names the batch."""
    error.add_note(f"in batch {delivery.index} of {split}" + (f", epoch {delivery.epoch}" if split == "train" else ""))
