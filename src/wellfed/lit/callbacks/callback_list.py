"""Several callbacks as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl

_HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


class Together(pl.Callback):
    """Hands each hook on to the callbacks that have it, in their order. None of them has a state of its own.

    Lightning calls all six hooks of a step on every callback, most of which have one or two.
    """

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        for name in _HOOKS:
            calls = [
                getattr(one, name) for one in callbacks if getattr(type(one), name) is not getattr(pl.Callback, name)
            ]
            if calls:
                setattr(self, name, _in_turn(calls))


def _in_turn(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call_all(*arguments: Any, **named: Any) -> None:
        for call in calls:
            call(*arguments, **named)

    return call_all
