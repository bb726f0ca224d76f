"""Calls a user's ``loss``: compiles it on request, checks what it returns, and adds facts to its errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.batches import Delivery, shapes_of
from wellfed.contract import Batch, LossOutput
from wellfed.errors import ModelError, WellfedError, is_the_users
from wellfed.train.memory import oom

_RETURN = (
    "Return the loss as a tensor of one number (loss.mean(), without .item()), a dict with 'loss', or "
    "LossOutput(loss, metrics={...})."
)


class Compiled:
    """A function that torch compiles, unless the mode is ``none``."""

    def __init__(self, function: Callable[..., Any], mode: str) -> None:
        """``mode``: a value of ``gpu.compile``."""
        self._mode = mode
        self._call = function if mode == "none" else torch.compile(function, mode=mode)
        self.overwrites = mode in ("reduce-overhead", "max-autotune")
        """Whether each call overwrites earlier results and gradients, as CUDA graphs do. Copy them to keep them."""
        self.has_compiled = False
        """True after a call that compiled, as a new shape makes it; reset by the reader."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the function. An error gets a note if torch may have failed to compile it."""
        if self._mode == "none":
            return self._call(*arguments, **named)
        before = _compiled_graphs()
        try:
            return self._call(*arguments, **named)
        except Exception as error:
            self.explain(error)
            raise
        finally:
            self.has_compiled = self.has_compiled or _compiled_graphs() != before

    def explain(self, error: Exception) -> None:
        """Adds a note to an error of a compiled function. A first backward pass compiles too."""
        note = f"The step is compiled (gpu.compile={self._mode}). gpu.compile=none runs it without torch.compile."
        if self._mode != "none" and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class Loss(Compiled):
    """``model.loss``, compiled on request."""

    def __init__(self, model: nn.Module, mode: str = "none", *, needs_gradient: bool = True) -> None:
        """``needs_gradient``: a backward pass follows if gradients are enabled."""
        super().__init__(model.loss, mode)  # type: ignore[arg-type]
        self._model, self._needs_gradient = model, needs_gradient
        self._name = f"{type(model).__name__}.loss"

    def __call__(self, batch: Batch) -> LossOutput:
        """Returns the model's loss for the batch.

        Raises:
            ModelError: the value can't be used as a loss, or a metric beside it is not one number or has a name of the
                engine's own.
        """
        try:
            if self.overwrites:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            given = super().__call__(batch)
        except Exception as error:
            add_context(error, self._model, batch)
            raise
        return _output_of(given, self._name, needs_gradient=self._needs_gradient)


def _output_of(given: Any, name: str, *, needs_gradient: bool) -> LossOutput:
    """Converts the return value of ``loss``; ``name`` is that of the function."""
    if isinstance(given, Mapping) and "loss" in given:
        # A tensor of shape [1] may be the scores of one sample.
        figures = {str(key): value for key, value in given.items() if key != "loss" and _is_scalar(value)}
        output = LossOutput(given["loss"], metrics=figures)
    else:
        output = given if isinstance(given, LossOutput) else LossOutput(given)
    loss: Any = output.loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(f"{name} returned {shapes_of(loss)} as the loss. {_RETURN}")
    if loss.dim():
        output.loss = loss = loss.reshape(())
    if needs_gradient and torch.is_grad_enabled() and not loss.requires_grad:
        raise ModelError(
            f"{name}: the loss ({loss.dtype}) has no gradient. It was computed under torch.no_grad(), from .item(), "
            ".detach() or .data, from integers, or by no weight that is trained (requires_grad)."
        )
    metrics: Any = output.metrics
    if not isinstance(metrics, Mapping):
        way_out = "Give a dict: metrics={'accuracy': accuracy}."
        raise ModelError(f"{name}: the metrics are {shapes_of(metrics)}. {way_out}")
    output.metrics = {key: _metric(value, key, loss, name) for key, value in metrics.items()}
    return output


def _metric(value: Any, key: str, loss: Tensor, name: str) -> Tensor:
    """Returns a metric as a tensor on the device of the loss."""
    if key in ("loss", "lr"):
        problem = f"a metric has the name {key}, under which the engine records a figure of its own"
        raise ModelError(f"{name}: {problem}. Rename it, such as own_{key}.")
    if isinstance(value, Tensor) and value.numel() == 1:
        return value if value.device == loss.device else value.to(loss.device)
    if isinstance(value, (int, float)):
        return torch.full((), float(value), device=loss.device)  # a fill; a copy would wait for the device
    raise ModelError(f"{name}: the metric {key} is {shapes_of(value)}, and must be one number, such as its mean.")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def add_context(error: Exception, model: nn.Module, batch: Batch = None) -> None:
    """Adds notes to an error of a user's model: the shapes of the batch, and the layer that failed.

    Args:
        batch: None = the variable ``batch`` of the user's function, if it has one.
    """
    if isinstance(error, WellfedError) or oom.classify(error) is not None:
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = next((frame for frame in frames if is_the_users(frame.f_code.co_filename)), None)
    if batch is None and own is not None:
        batch = own.f_locals.get("batch")
    if batch is not None:
        error.add_note(f"{type(model).__name__} was given {shapes_of(batch)}.")
    paths = {id(module): path for path, module in model.named_modules() if path}
    layers = [layer for frame in frames if id(layer := frame.f_locals.get("self")) in paths]
    if layers:
        error.add_note(f"It failed in the layer {paths[id(layers[-1])]}, a {type(layers[-1]).__name__}.")


def add_place(error: Exception, delivery: Delivery, split: str) -> None:
    """Adds a note that names the batch."""
    error.add_note(f"in batch {delivery.index} of {split}" + (f", epoch {delivery.epoch}" if split == "train" else ""))
