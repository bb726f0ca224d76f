"""Compiles the loss and other functions of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wellfed.contract import Batch, LossOutput
from wellfed.train.step.loss_faults import add_context, output_of


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
            ModelError: the loss returned something that can't be used as a loss.
        """
        try:
            if self.overwrites:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            given = super().__call__(batch)
        except Exception as error:
            add_context(error, self._model, batch)
            raise
        return output_of(given, self._name, needs_gradient=self._needs_gradient)


def _compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
