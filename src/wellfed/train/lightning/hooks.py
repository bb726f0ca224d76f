"""Lists Lightning's hooks, finds the overridden ones of a callback or module, and calls them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl

from wellfed.train.step.step_passes import StepListener

HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
"""All hooks of a callback, except those that save and load its state."""
IN_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls between the start of a step and the update of the weights."""


def hooks_of(owner: Any, among: Sequence[str] = HOOKS, base: type = pl.Callback) -> list[str]:
    """Returns the hooks that a callback or module overrides."""
    own = ((name, getattr(getattr(owner, name), "__func__", None)) for name in among)
    return [name for name, function in own if function is not getattr(base, name)]


def overrides(owner: Any, name: str) -> bool:
    """Returns whether a LightningModule or LightningDataModule overrides a method, in its class or as an attribute."""
    if name in vars(owner):
        return True
    bases = ("LightningDataModule", "LightningModule")
    found = [cls for cls in type(owner).__mro__ if cls.__name__ in bases]
    return bool(found) and getattr(type(owner), name) is not getattr(found[-1], name)  # users' classes come first


class Together(pl.Callback):
    """Several callbacks without state as one. It calls each hook on those that override it, in order.

    Lightning calls all six hooks of a step on every callback, and most override one or two.
    """

    def __init__(self, callbacks: Sequence[pl.Callback], only: Collection[str] = HOOKS) -> None:
        for name in only:
            inherited = getattr(pl.Callback, name)
            calls = [getattr(one, name) for one in callbacks if getattr(type(one), name) is not inherited]
            if calls:
                setattr(self, name, partial(_call, calls))


def _call(calls: Sequence[Callable[..., None]], *arguments: Any, **named: Any) -> None:
    for call in calls:
        call(*arguments, **named)


def calls_of(callbacks: Sequence[pl.Callback], hook: str) -> list[Callable[..., None]]:
    """Returns the methods of a hook in order, through `Together`, without those that do nothing."""
    found: list[Callable[..., None]] = []
    for own in [getattr(callback, hook) for callback in callbacks if hooks_of(callback, [hook])]:
        is_joint = isinstance(own, partial) and own.func is _call
        found += own.args[0] if is_joint else [own]
    return found


def callbacks_in_step(trainer: pl.Trainer, module: pl.LightningModule) -> StepListener:
    """Returns a function that calls the Trainer's callbacks within our step, as Lightning calls them within its own."""
    attributes = vars(module)

    def call(hook: str, *arguments: Any) -> None:
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], hook  # read by `module.log`
        for callback in trainer.callbacks:
            getattr(callback, hook)(trainer, module, *arguments)
        attributes["_current_fx_name"] = before

    return call


@contextmanager
def replaced(owner: Any, instead: Mapping[str, Any]) -> Iterator[None]:
    """Replaces methods of a module or strategy within the context."""
    own = {name: vars(owner)[name] for name in instead if name in vars(owner)}
    vars(owner).update(instead)
    try:
        yield
    finally:
        for name in instead:
            vars(owner).pop(name, None)  # it may have been removed already
        vars(owner).update(own)
