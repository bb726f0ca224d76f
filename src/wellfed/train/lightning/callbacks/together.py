"""Calls each hook on those of several callbacks that have it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl

from wellfed.train.lightning.in_step import HOOKS


class Together(pl.Callback):
    """Hands each hook on to the callbacks that have it, in their order. None of them has a state of its own.

    Lightning calls all six hooks of a step on every callback, most of which have one or two.
    """

    def __init__(self, callbacks: Sequence[pl.Callback], only: Collection[str] = HOOKS) -> None:
        for name in only:
            nothing = getattr(pl.Callback, name)
            calls = [getattr(one, name) for one in callbacks if getattr(type(one), name) is not nothing]
            if calls:
                setattr(self, name, partial(self._call, calls))

    @staticmethod
    def _call(calls: Sequence[Callable[..., None]], *arguments: Any, **named: Any) -> None:
        for call in calls:
            call(*arguments, **named)
