"""Ends a training early, after a validation, if a pruner decides so."""

from __future__ import annotations

from collections.abc import Callable

Pruner = Callable[[int, float], "str | None"]
"""Function of a validation's number, from 1, and its metric. Returns why training ends, or None."""


class Pruning:
    """Asks a pruner after each validation. A training that it ends has no error, and its last checkpoint."""

    def __init__(
        self,
        pruner: Pruner | None,
        figure: Callable[[], float | None],
        total_steps: int | None = None,
        validations: int = 0,
    ) -> None:
        """
        Args:
            pruner: the pruner; None on ranks other than the first, and without pruning.
            figure: returns the latest value of the metric; None without one.
            total_steps: steps of the whole training, at which it ends anyway; None = unknown.
            validations: number of validations in earlier parts of a resumed training.
        """
        self._pruner, self._figure, self._total_steps = pruner, figure, total_steps
        self._validations = validations

    def __call__(self, step: int) -> str | None:
        """Returns why training ends after the validation of this step; None = it goes on."""
        self._validations += 1
        value = self._figure()
        if self._pruner is None or value is None:
            return None
        reason = self._pruner(self._validations, value)
        is_over = self._total_steps is not None and step >= self._total_steps
        return None if is_over else reason
