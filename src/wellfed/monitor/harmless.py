"""Keeps what watches a training from harming it: the first error is told, and nothing is watched from then on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from wellfed.errors import reason_of

_LOG = logging.getLogger(__name__)
Given = ParamSpec("Given")
Self = TypeVar("Self", bound="Harmless")


class Harmless:
    """Something whose methods may be called within a training."""

    has_failed = False

    def abandon(self) -> None:
        """Give up what is held; called once, after an error."""


def harmless(method: Callable[Concatenate[Self, Given], Any]) -> Callable[Concatenate[Self, Given], None]:
    """A method that raises nothing; once one of the object has failed, each does nothing."""

    @functools.wraps(method)
    def called(self: Self, *arguments: Given.args, **named: Given.kwargs) -> None:
        if self.has_failed:
            return
        try:
            method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001
            self.has_failed = True
            name = type(self).__name__
            # Not by warnings, which may be errors.
            _LOG.warning("%s watches no more (%s); the training goes on.", name, reason_of(error))
            try:
                self.abandon()
            except Exception:  # noqa: BLE001
                _LOG.debug("%s could not be ended", name, exc_info=True)

    return called  # type: ignore[return-value]  # mypy takes the first argument for a named one
