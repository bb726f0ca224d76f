"""Protects training from errors of its watcher. The first error is logged and ends the watching."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from wellfed.errors import ConfigError, reason_of

_LOG = logging.getLogger(__name__)
Given = ParamSpec("Given")
Self = TypeVar("Self", bound="Harmless")


class Harmless:
    """Base of classes with `harmless` methods."""

    has_failed = False

    def abandon(self) -> None:
        """Releases resources; called once, after an error."""


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
            why = error.faults[0] if isinstance(error, ConfigError) else reason_of(error)
            # Not by the warnings module, which may raise errors.
            _LOG.warning("%s watches no more (%s); the training goes on.", name, why)
            try:
                self.abandon()
            except Exception:  # noqa: BLE001
                _LOG.debug("%s could not be ended", name, exc_info=True)

    return called  # type: ignore[return-value]  # mypy takes the first argument for a named one
