"""Tells of code that is written for pytorch_lightning, the other name of the same library."""

from __future__ import annotations


def not_lightnings(kind: type, base: str) -> tuple[str, str] | None:
    """What is wrong with a class that inherits from there, and the way out; None where nothing is."""
    if not any(f"{each.__module__}.{each.__name__}".startswith("pytorch_lightning.") for each in kind.__mro__):
        return None
    problem = f"{kind.__qualname__} is a {base} of pytorch_lightning, and this is run by lightning.pytorch."
    return problem, "In its file, write lightning.pytorch for pytorch_lightning: import lightning.pytorch as pl"
