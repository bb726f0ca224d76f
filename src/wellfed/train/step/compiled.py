"""Compiles the loss and other functions of a step; if that fails, they run uncompiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wellfed.contract import Batch, LossOutput
from wellfed.errors import first_line
from wellfed.train.step.loss_faults import add_context, output_of

_LOG = logging.getLogger(__name__)


class Compiled:
    """A function that torch compiles. If that fails, the function runs uncompiled from then on, with a warning.

    The failed call is repeated, so the function must have no side effects.
    """

    def __init__(self, function: Callable[..., Any], mode: str, on_failure: Callable[[str], None]) -> None:
        """``mode``: a value of ``gpu.compile``; ``none`` does not compile."""
        self._function, self._on_failure = function, on_failure
        self._compiled: Any = None if mode == "none" else torch.compile(function, mode=mode)
        self._has_graphs = mode in ("reduce-overhead", "max-autotune")
        self.has_compiled = False
        """True after a call that compiled, as a new shape makes it; reset by the reader."""

    @property
    def overwrites(self) -> bool:
        """Whether each call overwrites earlier results and gradients, as CUDA graphs do. Copy them to keep them."""
        return self._compiled is not None and self._has_graphs

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the function."""
        if self._compiled is None:
            return self._function(*arguments, **named)
        before = _compiled_graphs()
        try:
            return self._compiled(*arguments, **named)
        except Exception as error:
            if not self.gives_up(error):
                raise
        finally:
            self.has_compiled = self.has_compiled or _compiled_graphs() != before
        return self._function(*arguments, **named)

    def gives_up(self, error: Exception) -> bool:
        """Returns whether torch.compile failed, also in a later backward pass. Then the function runs uncompiled."""
        if self._compiled is None or not is_of_compiler(error):
            return False
        self._compiled, self.has_compiled = None, True
        first = first_line(error)
        _LOG.warning("gpu.compile failed (%s); going on without it.", first)
        self._on_failure(first)
        return True


class Loss(Compiled):
    """``model.loss``, compiled on request."""

    def __init__(
        self, model: nn.Module, mode: str, on_failure: Callable[[str], None], *, needs_gradient: bool = True
    ) -> None:
        """``needs_gradient``: a backward pass follows if gradients are enabled."""
        super().__init__(model.loss, mode, on_failure)  # type: ignore[arg-type]
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
            add_context(error, self._name, batch, self._model)
            raise
        return output_of(given, self._name, needs_gradient=self._needs_gradient)


def _compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def is_of_compiler(error: Exception) -> bool:
    """Returns whether torch.compile failed, rather than the compiled code."""
    from torch._dynamo import exc
    from torch._inductor.exc import CppCompileError

    return isinstance(error, (exc.TorchDynamoException, CppCompileError))
