"""Protects training from errors of its watcher. The first error is logged and ends the watching."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from wellfed.errors import reason_of

_LOG = logging.getLogger(__name__)
Given = ParamSpec("Given")
Self = TypeVar("Self", bound="Harmless")


INTERVAL_S, SHORTEST_S = 0.5, 0.1


class Harmless:
    """Base of classes that watch a user's own training loop."""

    has_failed = False

    def __init__(self, csv: str | Path | None = None, *, interval_s: float = INTERVAL_S, quiet: bool = False) -> None:
        """
        Args:
            csv: file for the curves, one row per reading. An older file of this kind is replaced, any other is kept.
            interval_s: seconds between two readings, at least 0.1.
            quiet: print nothing at the end. `summary` has the figures.

        Raises:
            TypeError: the interval is not a number.
            ValueError: the interval is too short.
        """
        super().__init__()
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)):
            raise TypeError(f"interval_s={interval_s!r}: must be a number of seconds, as {INTERVAL_S}.")
        if not SHORTEST_S <= interval_s < math.inf:
            raise ValueError(f"interval_s={interval_s}: readings are at least {SHORTEST_S} s apart.")
        self._csv, self._interval_s, self._quiet = csv, float(interval_s), quiet
        self._warned: set[str] = set()

    def abandon(self) -> None:
        """Releases resources; called once, after an error."""

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning("%s", text)


def harmless(method: Callable[Concatenate[Self, Given], Any]) -> Callable[Concatenate[Self, Given], None]:
    """Returns a method that raises nothing. After an error all such methods of the object do nothing."""

    @functools.wraps(method)
    def called(self: Self, *arguments: Given.args, **named: Given.kwargs) -> None:
        if self.has_failed:
            return
        try:
            method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001
            self.has_failed = True
            name = type(self).__name__
            # Not by the warnings module, which may raise errors.
            _LOG.warning("%s watches no more (%s); the training goes on.", name, reason_of(error))
            try:
                self.abandon()
            except Exception:  # noqa: BLE001
                _LOG.debug("%s could not be ended", name, exc_info=True)

    return called  # type: ignore[return-value]  # mypy takes the first argument for a named one
